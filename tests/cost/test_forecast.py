"""What a step is forecast to take: by hand, from round figures; and the memory that torch's allocator really gave."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from forecasts import forecast
from stretto import Trainer
from stretto.cost import Affine, Cluster, Device, Group, Link, Measured, ModelCosts
from stretto.cost.head_costs import tied_bytes
from stretto.cost.stage_prediction import stage_times
from stretto.cost.step_prediction import Pricer, Workers
from stretto.cost.worker_memory import PREFIX, peak_bytes
from stretto.measure import layer_costs
from stretto.methods import method
from stretto.optim.by_name import make_optimizer
from stretto.runtime.process_memory import peak_memory
from stretto.schedule import Action

F, B, W, U, A = 2.0, 4.0, 3.0, 1.0, 0.5  # seconds of a layer, whatever the examples; A for adding gradients
WIDTH, MEGA = 64, 1e6


@cache
def costs(number=4):
    rows = layer_costs([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)], torch.zeros(2, WIDTH)).layers
    lines = [Affine(x) for x in (F, B, B - W, W)]
    return ModelCosts(
        tuple(type(r)(**{**vars(r), "measured": Measured(*lines, update=U, accumulate=A)}) for r in rows), "float32"
    )


def cluster(link=None, nodes=2, **device):
    made = Device(memory=1e9, memory_bandwidth=2 * 4 * WIDTH * WIDTH, peak={"float32": 1e9}, **device)
    group = Group(nodes=nodes, workers=1, device="d", between="far")
    return Cluster(
        name="c", groups=(group,), devices={"d": made}, links={"far": link or Link(latency=0.0, bandwidth=1e30)}
    )


def seconds(name, link=None, bounds=(0, 1, 2), batch=8, **device):
    return forecast(costs(bounds[-1]), bounds, cluster(link, **device), name, batch, workers=2).seconds


def test_a_synchronous_step_by_hand():
    # 1F1B, two stages of a layer, two micro-batches; the first stage's backward is its weight gradient, of 3.
    assert seconds("1f1b(microbatches=2)") == pytest.approx(F + 2 * (F + B) + A + W + A + U)


def test_cures_of_the_step_by_hand():
    """Feedback is eleven thirds of an addition and one tensor more; products of a rotation wait for the memory here."""
    bounds, three = (0, 1, 2), costs(2)
    plain, fed, turned = (
        forecast(three, bounds, cluster(), name, 8, optimizer="adamw")
        for name in ("pipedream", "pipedream(feedback=2)", "pipedream(rotate=one-sided)")
    )
    assert fed.actions["U", 0, 0] - plain.actions["U", 0, 0] == pytest.approx(11 / 3 * A)
    # G, G^T, L twice; U and its two neighbours three times. A refresh: L U, U'^T U, squares and S, and the factors.
    each, again = (2 + 2 + 2 + 9) * WIDTH**2, (4 + 3 + 2 + 3 + 4) * WIDTH**2
    seconds = turned.actions["U", 0, 0] - plain.actions["U", 0, 0]
    assert seconds == pytest.approx(4 * (each + again / 5) / (2 * 4 * WIDTH**2))
    weight = 4 * WIDTH**2
    assert fed.bytes[0] - plain.bytes[0] in (weight, 2 * weight)  # two where an update takes the most
    assert turned.bytes[0] - plain.bytes[0] == (2 + 4 - 2) * weight  # an update has four tensors beside, Adam's two


def test_the_runtime_s_own_time_is_added():
    # backprop: F F B B U, one after the other; both updates at the same time
    plain = F + F + B + W + U
    assert seconds("backprop") == pytest.approx(plain)
    assert seconds("backprop", per_action=0.125) == pytest.approx(plain + 5 * 0.125)
    assert seconds("backprop", per_step=0.25) == pytest.approx(plain + 2 * 0.25)  # the second's in the way


def test_messages_keep_their_ends_busy_and_travel():
    # up and down; the loss is told when its worker's turn is over, and heard at the end of the other's
    size = 8 * WIDTH * 4
    slow = Link(latency=1.0, bandwidth=size / 2, send=0.125, receive=0.25)
    ends = 2 * 0.125 + 3 * 0.25
    travels = 2 * (1.0 - 0.375 + 2.0)
    assert seconds("backprop", slow) == pytest.approx(F + F + B + W + U + ends + travels)


def test_what_an_input_gradient_has_taken_is_there_for_its_weight_gradient():
    slow = Link(latency=0.25, bandwidth=1e30, receive=0.25)
    told = forecast(costs(3), (0, 1, 2, 3), cluster(slow, nodes=3), "zb-h1(microbatches=4)", 8, workers=3).actions
    assert told["F", 1, 0] == pytest.approx(F + 0.25)
    assert told["I", 1, 0] == pytest.approx(B - W + 0.25)
    assert told["W", 1, 0] == pytest.approx(W)


def test_stashed_weights_are_copied_at_an_update():
    copied = 1.0  # reads and writes as many bytes as the memory moves in a second
    pb, pipedream = (seconds(name, bounds=(0, 2, 4)) for name in ("pb", "pipedream"))
    first, last = 2 * F + (B + W) + 2 * U, 2 * F + 2 * B + 2 * U
    assert pb == pytest.approx(max(first, last))
    assert pipedream == pytest.approx(max(first + 2 * copied, last))


def test_heads_are_part_of_their_stages():
    row = costs(1).layers[0]
    rows = costs(2)
    greedy = forecast(rows, (0, 1, 2), cluster(), "greedy", 8, workers=2, heads=[row, None])
    assert greedy.actions["F", 0, 0] == pytest.approx(2 * F)
    assert greedy.actions["B", 0, 0] == pytest.approx(W + B)
    assert greedy.seconds == pytest.approx(2 * F + W + B + 2 * U)


def test_stages_that_send_no_gradient_compute_none():
    row, rows = costs(1).layers[0], costs(2)
    for name, backward in (("greedy", W), ("chunked(chunks=2)", W), ("overlapping(delay=1)", B)):
        split = name.startswith("overlapping")  # I and W: the gradient goes to the stage below
        actions = forecast(rows, (0, 1, 2), cluster(), name, 8, workers=2, heads=[row, None]).actions
        top = actions["I", 1, 0] + actions["W", 1, 0] if split else actions["B", 1, 0]
        assert top == pytest.approx(backward), name


VOCABULARY = 24


@cache
def language_costs():
    model = LanguageModel()
    return layer_costs([model.embedding, model.block, model.readout], torch.zeros(2, 4, dtype=torch.long))


class LanguageModel(nn.Module):
    """An embedding that is the unembedding too, and something between them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.readout = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.readout.weight = self.embedding.weight


def test_tied_weights_travel_to_the_stage_that_borrows_them_and_their_gradients_back():
    table = language_costs()
    assert ModelCosts.of(table.to_dict()) == table
    size = 4 * VOCABULARY * WIDTH
    assert tied_bytes(table, (0, 1, 3)) == {(0, 1): size}
    assert tied_bytes(table, (0, 3)) == {}
    nothing = Measured(*[Affine()] * 4, update=0.0, accumulate=0.0)  # what is computed takes no time
    free = replace(table, layers=tuple(replace(row, measured=nothing) for row in table.layers))
    link = Link(latency=0.0, bandwidth=1e3)
    tied, apart = (
        forecast(each, (0, 1, 3), cluster(link), "backprop", 8, workers=2).seconds
        for each in (free, replace(free, ties=()))
    )
    # behind the last update the weights go up before the activation, behind the gradient theirs comes down
    assert apart == pytest.approx(2 * 8 * 4 * WIDTH * 4 / 1e3)
    assert tied - apart == pytest.approx(2 * size / 1e3)


def test_weights_that_layers_of_one_stage_share_are_kept_once():
    table = language_costs()
    numbers, size = sum(p.numel() for p in LanguageModel().parameters()), 4 * VOCABULARY * WIDTH
    (stage,) = table.stages((0, 3))
    assert (stage.parameter_bytes, stage.gradient_bytes) == (4 * numbers, 4 * numbers)
    assert sum(stage.parameter_bytes for stage in table.stages((0, 1, 3))) == 4 * numbers + size
    memory = [
        forecast(each, (0, 3), cluster(Link(latency=0.0, bandwidth=1e3)), "backprop", 8, optimizer="adam")
        for each in (table, replace(table, ties=()))
    ]
    # the weights, their gradients, and two numbers of state
    assert memory[1].bytes[0] - memory[0].bytes[0] == 4 * size


class Several(nn.Module):
    """Something with insides."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(2 * width)

    def forward(self, x):
        """A residual block."""
        return x + self.two(torch.relu(self.norm(self.one(x))))


SLOW = pytest.mark.slow
KEPT = [
    *((name, "sgd") for name in ("backprop", "pb", "pipedream")),
    pytest.param("pipedream(rotate=True)", "adamw", marks=SLOW),
    pytest.param("gpipe(microbatches=4)", "sgd", marks=SLOW),
    pytest.param("pb", "muon", marks=SLOW),
    pytest.param("pb-lwpw", "adam", marks=SLOW),
    *(pytest.param(name, "sgd", marks=SLOW) for name in ("pb-lwp", "pb-lwp-sc", "pipemare", "spectrain", "pipeoptim")),
    *(pytest.param(f"pb(stash=True, predict={form})", "sgd", marks=SLOW) for form in ("velocity", "step")),
    *(pytest.param(name, "adam", marks=SLOW) for name in ("backprop", "gpipe(microbatches=4)", "pb", "pipedream")),
    pytest.param("pipedream(rotate=one-sided, feedback=1)", "adamw", marks=SLOW),
    *(pytest.param("pipedream", name, marks=SLOW) for name in ("muon", "soap", "lion")),
]


@pytest.mark.parametrize(("name", "optimizer"), KEPT)
def test_memory_is_what_torch_s_allocator_gave(name, optimizer):
    assert told_bytes(name, optimizer) == pytest.approx(measured_bytes(name, optimizer), rel=0.05)


@pytest.mark.parametrize(
    "name", ["pb-lwpw", *(pytest.param(each, marks=SLOW) for each in ("pb-lwp", "pb(predict=step)"))]
)
def test_what_predictions_keep_beside_pb_is_what_torch_s_allocator_gave(name):
    told, measured = (bytes_of(name, "sgd") - bytes_of("pb", "sgd") for bytes_of in (told_bytes, measured_bytes))
    assert told > 100_000
    assert told == pytest.approx(measured, rel=0.01)


@cache
def several_costs():
    x = torch.randn(2, 96)
    return layer_costs([Several(96) for _ in range(4)], x, loss=mse_loss, target=x)


def told_bytes(name, optimizer):
    """The predicted peak bytes of two stages on one worker."""
    made = method(name)
    schedule, rules = made.plan(2, 1)
    share = 64 / schedule.per_turn
    (told,) = peak_bytes(made, schedule, rules, several_costs(), (0, 2, 5), share, optimizer=optimizer)
    return told


@cache
def measured_bytes(name, optimizer):
    """The same, of training."""
    x, momentum = torch.randn(64, 96), 0.9 if optimizer == "sgd" else None
    with peak_memory() as peak:
        halves = [nn.Sequential(*(Several(96) for _ in range(2))) for _ in range(2)]
        trainer = Trainer(
            halves, mse_loss, make_optimizer(optimizer, 1e-3, momentum, 0.0), name, workers=1, device="cpu"
        )
        for _ in range(6):
            trainer.step(x, x)
    return peak.bytes


def test_stages_of_one_worker_get_shared_weights_in_one_message():
    """Stage 0 lends to stages 3 and 5 of worker 1; each of them sends a gradient back."""
    chosen, size = method("gpipe(microbatches=1)"), 1000.0
    schedule, rules = chosen.plan(6, 2, ties=((0, 3), (0, 5)))
    free = replace(costs(6), layers=tuple(replace(row, measured=Measured(*[Affine()] * 4)) for row in costs(6).layers))
    link = Link(latency=0.0, bandwidth=1e30, send_per_byte=1.0, receive_per_byte=2.0)
    times = stage_times(free, range(7), cluster(link), 1, workers=[[s % 2] for s in range(6)])
    workers = Workers.alone(cluster(link), 2)
    both, alone = (
        Pricer(chosen, schedule, each, workers, times, {(0, 3): size, (0, 5): more})
        for each, more in ((rules, size), (chosen.plan(6, 2, ties=((0, 3),))[1], 0.0))
    )

    def extra(kind, stage):
        action = Action(kind, stage, 0)
        return both.message_seconds(action, stage % 2) - alone.message_seconds(action, stage % 2)

    assert alone.message_seconds(Action("U", 0, 0), 0) == size + 2 * size  # weights go, a gradient has come
    assert extra("U", 0) == 2 * size  # one gradient more, and no message
    assert extra("F", 5) == 0
    assert extra("B", 5) == size
    sent = [edge for edge in rules.makes(Action("U", 0, 0)) if edge.value == "tied-weight"]
    assert [both.size(edge) for edge in sent] == [size, 0.0]


def test_message_buffers_hold_shared_weights():
    table = language_costs()
    told = [
        forecast(each, (0, 1, 3), cluster(), "backprop", 8, workers=2).bytes
        for each in (table, replace(table, ties=(), read_rows=()))
    ]
    lower, upper = (tied - apart for tied, apart in zip(*told, strict=True))
    size = 4 * VOCABULARY * WIDTH
    # A sender has what may wait and two to spare, a receiver one. Weights go up, and two may wait: those of the next
    # update are made before the last ones are read. Their gradients come down, where the owner waits for them.
    assert lower == (2 + 2 + 1) * (size + PREFIX)
    assert upper == (1 + 1 + 2) * (size + PREFIX)


@pytest.mark.parametrize(("delay", "again"), [(1, 0), (2, 1)])
def test_what_predicts_gradients_is_part_of_its_stages(delay, again):
    """Forward in B; a backward without an input's gradient, and the update, in L; a forward where no graph is kept."""
    row, rows = costs(1).layers[0], costs(2)
    name = f"synthetic-gradients(delay={delay})"
    synthetic = forecast(rows, (0, 1, 2), cluster(), name, 8, workers=2, heads=[row, None])
    plain = forecast(rows, (0, 1, 2), cluster(), name, 8, workers=2)
    assert synthetic.actions["F", 0, 0] == pytest.approx(F)
    assert synthetic.actions["B", 0, 0] == pytest.approx(W + F)
    assert synthetic.actions["B", 1, 0] == pytest.approx(B)
    assert synthetic.actions["L", 0, 0] == pytest.approx(W + U + again * F)
    assert synthetic.seconds == pytest.approx(F + W + F + W + 2 * U + again * F)
    assert synthetic.bytes[0] >= plain.bytes[0] + row.parameter_bytes
    assert synthetic.bytes[1] == plain.bytes[1]
