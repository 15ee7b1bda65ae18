"""The five things that can happen to a stage, one at a time, against gradients by hand."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import stretto
from stretto.errors import UsageError
from stretto.schedule import Reach, Rules
from stretto.stage.precision import Precision
from stretto.stage.stage import PhaseSettings, Stage, StageParts, Target, add, add_gradients, pop_gradients
from stretto.stage.trainer_arguments import Specification
from stretto.weights import Current, Stash

MIDDLE = Reach((None, 1, 1))  # overlapping: stage 1 is trained by its own head and by the one above


def linear(seed, a=3, b=3):
    torch.manual_seed(seed)
    return nn.Linear(a, b).double()


def make(
    index=1, reach=MIDDLE, weights=Current, module=None, head=True, *,
    split=True, mean=False, per_update=1, step=None, **parts,
):  # fmt: skip
    module = linear(0) if module is None else module
    head = linear(1) if head is True else head
    parameters = [p for part in (module, head) if part is not None for p in part.parameters()]
    parts = StageParts(
        index=index, module=module, head=head, **{"optimizer": torch.optim.SGD(parameters, lr=1.0), **parts}
    )  # fmt: skip
    specification = Specification(
        method=stretto.method("overlapping", combine="mean" if mean else "sum"), loss=mse_loss,
        optimizer=lambda _: parts.optimizer, precision=Precision(None), device=torch.device("cpu"),
        mesh=stretto.Mesh(), sync=stretto.AllReduce(),
    )  # fmt: skip
    rules = Rules(reach, split=frozenset([index] if split else []), per_update=per_update)
    phase = PhaseSettings(weights(module), step or (lambda _: parts.optimizer.step()))
    return Stage(parts, specification, rules, phase)


class Seeds:
    """What a stage calls before each forward."""

    def __init__(self, start):
        self.start = start


def data(seed=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(3)]


def grads(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def forward(stage, microbatch, x, y):
    return stage.run("F", microbatch, {"activation": (x,), "target": Target(y)})


def by_hand(stage, x, y, above):
    """Gradients of the own loss, and of what the stage above sent, by plain autograd at the present weights."""
    module, head = list(stage.module.parameters()), list(stage.head.parameters())
    x = x.clone().requires_grad_()
    h = stage.module(x)
    loss = mse_loss(stage.head(h), y)
    own = torch.autograd.grad(loss, [x, *module, *head], retain_graph=True)
    hop = torch.autograd.grad(h, module, above)
    return loss, own[0], own[1 : 1 + len(module)], own[1 + len(module) :], hop


def close(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weights", [Current, Stash])
def test_the_halves_of_a_backward(weights, mean):
    stage = make(weights=weights, mean=mean)
    x, y, above = data()
    loss, to_input, own, to_head, hop = by_hand(stage, x, y, above)

    made = forward(stage, 0, x, y)
    assert made["loss"] == loss
    assert not made["loss"].requires_grad
    assert torch.equal(made["activation"][0], stage.module(x))
    assert not made["activation"][0].requires_grad

    half = stage.run("I", 0, {"graph": made["graph"]})
    close([g[0] for g in half["gradient"]], [to_input])  # of the own head alone, never divided
    assert grads(stage.module) == [None, None]  # nothing is due before W
    assert grads(stage.head) == [None, None]

    sent = above.clone()
    stage.run("W", 0, {"graph": made["graph"], "cotangent": half["cotangent"], "gradient": ((sent,),)})
    share = 0.5 if mean else 1
    close(grads(stage.module), [share * (a + b) for a, b in zip(own, hop, strict=True)])
    close(grads(stage.head), to_head)
    assert torch.equal(sent, above)  # a message may have other readers

    before = [p.detach().clone() for p in (*stage.module.parameters(), *stage.head.parameters())]
    gradients = [*grads(stage.module), *grads(stage.head)]
    stage.run("U", 0, {})
    close([p.detach() for p in (*stage.module.parameters(), *stage.head.parameters())],
          [p - g for p, g in zip(before, gradients, strict=True)])  # fmt: skip
    assert grads(stage.module) + grads(stage.head) == [None] * 4
    assert stage.updates == 1


def test_a_heads_gradient_waits_for_its_own_micro_batch():
    """F(1) I(1) W(0) U(0): the update of 0 holds nothing of 1, in module and head."""
    stage = make(weights=Stash)
    (x0, y0, above0), (x1, y1, above1) = data(5), data(6)
    _, _, own0, head0, hop0 = by_hand(stage, x0, y0, above0)
    _, _, own1, head1, hop1 = by_hand(stage, x1, y1, above1)
    graphs = [forward(stage, m, x, y)["graph"] for m, (x, y) in enumerate([(x0, y0), (x1, y1)])]
    halves = [stage.run("I", m, {"graph": graph})["cotangent"] for m, graph in enumerate(graphs)]
    for m, (above, own, head, hop) in enumerate([(above0, own0, head0, hop0), (above1, own1, head1, hop1)]):
        stage.run("W", m, {"graph": graphs[m], "cotangent": halves[m], "gradient": ((above,),)})
        close(grads(stage.head), head)
        close(grads(stage.module), [a + b for a, b in zip(own, hop, strict=True)])
        stage.run("U", m, {})


def test_the_share_of_a_micro_batch_scales_loss_and_gradients():
    x, y, _ = data()
    whole, part = (make(index=0, reach=Reach((0,)), split=False, head=None) for _ in range(2))
    for stage, share in ((whole, 1.0), (part, 0.25)):
        made = stage.run("F", 0, {"activation": (x,), "target": Target(y, share)})
        stage.run("B", 0, {"graph": made["graph"]})
        stage.value = made["loss"]
    close([part.value], [0.25 * whole.value])
    close(grads(part.module), [0.25 * g for g in grads(whole.module)])


@pytest.mark.parametrize("split", [False, True])
def test_nothing_flows_below_a_stop(split):
    stage = make(index=1, reach=Reach((0, 0)), head=None, split=split)
    x, y, _ = data()
    made = forward(stage, 0, x.requires_grad_(), y)
    stage.run("I" if split else "B", 0, {"graph": made["graph"]})
    assert x.grad is None
    assert not made["graph"].inputs[0].requires_grad


def test_a_reach_that_needs_two_sweeps_wants_them():
    with pytest.raises(AssertionError, match="stage 1 needs I and W"):
        make(split=False)
    make(index=2, split=False, head=None)


def test_micro_batches_are_announced_before_their_forward():
    seen = []
    stage = make(seeds=Seeds(seen.append))
    x, y, _ = data()
    for microbatch in (3, 7):
        forward(stage, microbatch, x, y)
    assert seen == [3, 7]


def test_the_scheduler_steps_with_each_update():
    stage = make()
    stage.scheduler = torch.optim.lr_scheduler.StepLR(stage.optimizer, 2, gamma=0.1)
    x, y, above = data()
    rates = []
    for microbatch in range(5):
        made = forward(stage, microbatch, x, y)
        half = stage.run("I", microbatch, {"graph": made["graph"]})
        stage.run("W", microbatch, {"graph": made["graph"], "cotangent": half["cotangent"], "gradient": ((above,),)})
        rates.append(stage.optimizer.param_groups[0]["lr"])
        stage.run("U", microbatch, {})
    assert rates == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_errors_say_where():
    stage = make()
    with pytest.raises(UsageError, match=r"stage 1 \(Linear\) cannot take what stage 0 gives, \[2, 9\]") as error:
        forward(stage, 4, torch.zeros(2, 9).double(), torch.zeros(2, 3).double())
    assert error.value.__notes__ == ["in action 1F4: stage 1, micro-batch 4"]


def test_state_of_another_kind_of_stage():
    state = make().state_dict()
    assert state["updates"] == 0
    with pytest.raises(UsageError, match=r"run\.pt: stage 1 has no head here and had a head there"):
        make(head=None).load_state_dict(state, "run.pt")


# -- gradients as data ------------------------------------------------------------------------------------------------


def test_add_skips_what_is_not_there_and_changes_nothing():
    a, b = torch.ones(2), torch.full((2,), 2.0)
    total = add([(a, None, None), (), (b, b, None)])
    assert torch.equal(total[0], torch.full((2,), 3.0))
    assert torch.equal(total[1], b)
    assert total[2] is None
    assert torch.equal(a, torch.ones(2))
    assert torch.equal(b, torch.full((2,), 2.0))
    assert add([]) == add([()]) == ()
    assert add([(), (a,)])[0] is a


def test_take_and_give():
    tensors = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    tensors[0].grad = torch.ones(2)
    taken = pop_gradients(tensors)
    assert [t.grad for t in tensors] == [None] * 3
    add_gradients(tensors, taken)
    add_gradients(tensors, (torch.ones(2), None, None))
    assert torch.equal(tensors[0].grad, torch.full((2,), 2.0))
    assert torch.equal(taken[0], torch.ones(2))
    assert tensors[1].grad is None
