"""The one object a user's script needs: what it returns, keeps, restores and refuses."""

import copy
import gc
import itertools
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import stretto
from laws.networks import NETWORKS, assert_equal, features, labels, run, state
from pairwise import in_turn, slow_where
from stretto.errors import StrettoError, UsageError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
METHODS = [
    "backprop", "greedy", "overlapping", "overlapping(combine=mean)", "overlapping(delay=1)", "chunked",
    "chunked(chunks=4)",
]  # fmt: skip
FEW = ("backprop", "overlapping(delay=1)", "chunked")
OVERTAKING = [method for method in METHODS if method != "backprop"]


def linears(*widths):
    torch.manual_seed(0)
    return [nn.Linear(a, b).double() for a, b in itertools.pairwise(widths)]


def make(method="greedy", stages=None, loss=cross_entropy, optimizer=SGD, **options):
    return stretto.Trainer(linears(6, 5, 5, 4) if stages is None else stages, loss, optimizer, method, **options)


def batches(count, seed=1, n=6):
    g = torch.Generator().manual_seed(seed)
    return [(features(g, n, 6), labels(g, n)) for _ in range(count)]


def network_trainer(name="cnn", method="greedy", count=4, **options):
    network = NETWORKS[name]
    options = {"example": network.batches(1)[0][0], **options}
    return stretto.Trainer(network.stages(count), network.loss, SGD, method, **options)


def everything(trainer):
    return [*trainer.stages, *trainer.heads]


# -- step, flush ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_step_returns_the_loss_of_lag_steps_ago(method, num_stages):
    if num_stages < stretto.method(method).options.get("chunks", 1):
        pytest.skip("more chunks than stages")
    lag = 0 if method == "backprop" else 2 * num_stages
    data = batches(lag + 4)
    trainer = make(method, linears(*[6] * num_stages, 4))
    assert trainer.lag == lag
    values = [trainer.step(x, y) for x, y in data]
    assert [value is None for value in values] == [n < lag for n in range(len(data))]
    rest = trainer.flush()
    assert len(rest) == lag
    losses = values[lag:] + rest
    if "delay" not in method:  # the output's loss of the first minibatch, at the first weights; of the next, after it
        reference = make(method, linears(*[6] * num_stages, 4))
        for (x, y), value in zip(data, losses, strict=True):
            with torch.no_grad():
                assert value == cross_entropy(run(reference.stages, x), y).item()
            reference.step(x, y)
            reference.flush()


def test_flush_forgets_nothing_and_step_goes_on_after_it():
    """A flush (as save does it) changes nothing in what the steps return."""
    data = batches(12)
    plain, flushed = make("greedy"), make("greedy")
    wanted = [plain.step(x, y) for x, y in data]
    values = []
    for n, (x, y) in enumerate(data):
        values.append(flushed.step(x, y))
        if n % 3 == 0:
            rest = flushed.flush()
            assert len(rest) == min(n + 1, 6)
            assert flushed.flush() == rest
    assert values == wanted
    assert flushed.flush() == plain.flush()
    assert_equal(everything(flushed), everything(plain))


def test_nothing_to_flush():
    assert make("greedy").flush() == []
    assert make("backprop").flush() == []


def test_a_loss_that_is_not_a_number_passes_through():
    trainer = make("backprop")
    x, y = batches(1)[0]
    x[0, 0] = math.nan
    assert math.isnan(trainer.step(x, y))
    trainer = make("overlapping(delay=1)")
    for _ in range(7):
        value = trainer.step(x, y)
    assert math.isnan(value)
    assert all(math.isnan(value) for value in trainer.flush())


@pytest.mark.parametrize("method", slow_where(lambda method: "delay" not in method, METHODS))
def test_nothing_is_kept_of_finished_minibatches(method):
    trainer = network_trainer("cnn", method)
    alive, held = [], []
    for x, y in NETWORKS["cnn"].batches(30):
        alive.append(weakref.ref(x))
        trainer.step(x, y)
        held.append(len(trainer._interpreter.values))
        del x, y
    assert max(held[10:]) == max(held[:10])
    trainer.flush()
    gc.collect()
    assert trainer._interpreter.values == {}
    assert not trainer._interpreter._waiting
    assert not any(trainer._interpreter.queues)
    assert not any(ref() is not None for ref in alive)
    assert len(trainer._losses) <= trainer.lag
    assert all(p.grad is None for module in everything(trainer) if module for p in module.parameters())


# -- evaluate ---------------------------------------------------------------------------------------------------------


def test_evaluate_weighs_batches_by_their_examples():
    trainer = make("backprop")
    data = [*batches(2, n=6), *batches(1, seed=5, n=1)]
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    with torch.no_grad():
        output = run(trainer.stages, x)
    result = trainer.evaluate(iter(data))
    assert result["loss"] == pytest.approx(cross_entropy(output, y).item(), rel=1e-12)
    assert result["accuracy"] == pytest.approx((output.argmax(1) == y).double().mean().item())


def test_evaluate_counts_tokens_and_pixels():
    trainer = network_trainer("transformer", "backprop")
    x, y = NETWORKS["transformer"].batches(1)[0]
    with torch.no_grad():
        right = (run(copy.deepcopy(trainer.stages), x).argmax(-1) == y).double().mean().item()
    assert trainer.evaluate([(x, y)])["accuracy"] == pytest.approx(right)
    pixels = make("backprop", [nn.Conv2d(1, 3, 1).double()])
    for size in ((4, 5), (3, 3)):  # as many rows and columns as classes, too
        x, y = torch.randn(2, 1, *size, dtype=torch.float64), torch.randint(3, (2, *size))
        with torch.no_grad():
            right = (pixels.stages[0](x).argmax(1) == y).double().mean().item()
        assert pixels.evaluate([(x, y)])["accuracy"] == pytest.approx(right)


def test_padding_of_any_number_below_zero_has_no_part_in_the_accuracy():
    """A tagger's own loss may leave out -1 as well as torch's -100; either would be right nowhere."""

    def loss(output, target):
        kept = target >= 0
        return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()

    x = torch.randn(2, 5, 6, dtype=torch.float64)
    trainer = make("backprop", [nn.Linear(6, 3).double()], loss=loss)
    with torch.no_grad():
        y = trainer.stages[0](x).argmax(-1)
    y[0, 0] = (y[0, 0] + 1) % 3
    for padding in (-1, -100):
        y[:, 4:] = padding
        assert trainer.evaluate([(x, y)])["accuracy"] == 7 / 8


def test_evaluate_without_classes_has_no_accuracy():
    trainer = make("backprop", linears(6, 3, 2), loss=mse_loss)
    x = batches(1)[0][0]
    assert trainer.evaluate([(x, torch.zeros(6, 2).double())]).keys() == {"loss"}


@pytest.mark.parametrize(
    ("columns", "targets"), [(1, torch.tensor([0, 1, 1, 0, 1, 1])), (2, torch.tensor([0, 3, 1, 7, 1, 0]))]
)
def test_a_logit_and_counts_have_no_accuracy(columns, targets):
    trainer = make("backprop", linears(6, 3, columns), loss=lambda output, y: mse_loss(output[:, 0], y.double()))
    x = batches(1)[0][0]
    assert trainer.evaluate([(x[:1], targets[:1]), (x, targets)]).keys() == {"loss"}


@pytest.mark.parametrize("of_logits", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_logit_or_a_chance_is_told_from_the_other_class(of_logits, dtype):
    entropy = nn.functional.binary_cross_entropy_with_logits if of_logits else nn.functional.binary_cross_entropy
    stages = linears(6, 3, 1)
    stages = stages if of_logits else [*stages, nn.Sigmoid()]
    trainer = make("backprop", stages, loss=lambda output, y: entropy(output.squeeze(-1), y.to(output)))
    x, y = batches(1)[0][0], torch.tensor([0, 1, 1, 0, 1, 1]).to(dtype)
    right = (trainer.model(x).squeeze(-1) > (0 if of_logits else 0.5)) == (y > 0)
    result = trainer.evaluate([(x[:4], y[:4]), (x[4:], y[4:])])
    assert result["accuracy"] == pytest.approx(right.double().mean().item())


def test_what_cross_entropy_ignores_has_no_part_in_the_accuracy():
    trainer = make("backprop", linears(6, 3, 3), loss=nn.CrossEntropyLoss(ignore_index=2))
    x, y = batches(1)[0][0], torch.tensor([0, 2, 1, 2, 1, 0])
    right = trainer.model(x).argmax(1) == y
    assert trainer.evaluate([(x, y)])["accuracy"] == pytest.approx(float(right[y != 2].double().mean()))


def test_evaluate_of_nothing_is_refused():
    used_up = iter(batches(1))
    trainer = make("backprop")
    trainer.evaluate(used_up)
    with pytest.raises(UsageError, match=r"no examples.*used-up generator"):
        trainer.evaluate(used_up)


@pytest.mark.parametrize("method", slow_where(lambda method: method not in FEW, METHODS))
def test_evaluate_drains_nothing_and_leaves_no_trace(method):
    """Between any two steps, with minibatches in flight."""
    network = NETWORKS["cnn"]
    plain, watched = (network_trainer("cnn", method) for _ in range(2))
    for x, y in network.batches(6):
        before = state(watched.stages)["0.blocks.0.1.running_mean"].clone()
        first = watched.evaluate([(x, y)])
        assert watched.evaluate([(x, y)]) == first
        assert torch.equal(state(watched.stages)["0.blocks.0.1.running_mean"], before)
        assert plain.step(x, y) == watched.step(x, y)
    assert plain.flush() == watched.flush()
    assert_equal(everything(watched), everything(plain))


def test_modes_are_restored_one_by_one():
    trainer = network_trainer("cnn", "greedy")
    frozen = next(m for m in trainer.stages[1].modules() if isinstance(m, nn.BatchNorm2d)).eval()
    x, y = NETWORKS["cnn"].batches(1)[0]
    trainer.evaluate([(x, y)])
    assert not frozen.training
    assert all(m.training for stage in trainer.stages for m in stage.modules() if m is not frozen)
    before = frozen.running_mean.clone()
    trainer.step(x, y)
    assert torch.equal(frozen.running_mean, before)
    with pytest.raises(UsageError, match=r"evaluate: the model or the loss cannot take batch 0, x Tensor \["):
        trainer.evaluate([(x[:, :, :2], y)])
    assert not frozen.training
    assert trainer.stages[0].training


# -- the model, gather ------------------------------------------------------------------------------------------------


def test_the_model_is_the_users_own_modules():
    stages = linears(6, 5, 5, 4)
    trainer = make("greedy", stages)
    assert isinstance(trainer.model, nn.Sequential)
    assert all(a is b for a, b in zip(trainer.model, stages, strict=True))
    assert all(a is b for a, b in zip(trainer.stages, stages, strict=True))
    assert [type(head) for head in trainer.heads] == [nn.Linear, nn.Linear, type(None)]
    x, y = batches(1)[0]
    before = copy.deepcopy(stages)
    trainer.step(x, y)
    assert not any(torch.equal(a.weight, b.weight) for a, b in zip(stages, before, strict=True))
    assert pickle.loads(pickle.dumps(trainer.model))(x).equal(trainer.model(x))


@pytest.mark.parametrize("name", ["tuples", "transformer"])
def test_the_model_runs_stages_that_hand_on_tuples(name):
    trainer = network_trainer(name, "overlapping")
    x, _ = NETWORKS[name].batches(1)[0]
    assert torch.equal(trainer.model(x), run(trainer.stages, x))


@pytest.mark.parametrize("method", METHODS)
def test_gather_has_the_models_keys_and_those_of_heads(method):
    trainer = network_trainer("cnn", method)
    gathered = trainer.gather()
    model = trainer.model.state_dict()
    heads = {f"heads.{s}.{key}": value for s, head in enumerate(trainer.heads) if head is not None
             for key, value in head.state_dict().items()}  # fmt: skip
    assert gathered.keys() == {**model, **heads}.keys()
    assert all(torch.equal(gathered[key], value) for key, value in {**model, **heads}.items())
    assert bool(heads) == (method != "backprop")


# -- save, load -------------------------------------------------------------------------------------------------------


def scheduled(kind):
    return {
        None: None,
        "one-cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
        "multi-step": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 5], gamma=0.3),
        "lambda": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda k: 1 / (1 + k)),
    }[kind]


def go_on(trainer, data):
    values = [trainer.step(x, y) for x, y in data]
    return [*values, *trainer.flush()], {key: value.clone() for key, value in trainer.gather().items()}


def assert_same_run(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(torch.equal(found[1][key], value) for key, value in wanted[1].items())


def dropping(method, **options):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)).double() for _ in range(3)]
    optimizer = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    return make(method, [*stages, *linears(6, 4)], optimizer=optimizer, example=batches(1)[0][0], **options)


RESUMED = ("backprop-None", "greedy-one-cycle", "overlapping-lambda", "overlapping(delay=1)-None", "chunked-multi-step")
CASES = [
    pytest.param(*case.values, marks=[pytest.mark.slow] * ("{}-{}".format(*case.values) not in RESUMED))
    for case in in_turn(METHODS, [None, "one-cycle", "multi-step", "lambda"], rounds=2)
]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_a_resumed_run_is_the_run_that_went_on(method, kind, tmp_path):
    data, scheduler = batches(12), scheduled(kind)
    trainer = dropping(method, scheduler=scheduler)
    for x, y in data[:6]:
        trainer.step(x, y)
    trainer.save(tmp_path / "run.pt")
    wanted = go_on(trainer, data[6:])

    fresh = dropping(method, scheduler=scheduler, workers=2)
    for stage in fresh.stages:
        stage.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    fresh.load(tmp_path / "run.pt")
    assert [stage.updates for stage in fresh._stages.values()] == [6] * 4
    assert_same_run(go_on(fresh, data[6:]), wanted)
    trainer.load(tmp_path / "run.pt")  # back in time, in the same trainer
    assert_same_run(go_on(trainer, data[6:]), wanted)
    trainer.step(*data[0])  # and with something in flight
    trainer.load(tmp_path / "run.pt")
    assert trainer._interpreter.values == {}
    assert_same_run(go_on(trainer, data[6:]), wanted)


@pytest.mark.parametrize(
    ("method", "every"),
    [*(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("backprop", "greedy", "overlapping")),
     ("overlapping", 4)],
)  # fmt: skip
def test_saving_changes_nothing_where_nothing_waits(method, every, tmp_path):
    """Only a delay makes a drain visible."""
    data = batches(10)
    plain, saved = dropping(method), dropping(method)
    first = go_on(plain, data)
    values = []
    for n, (x, y) in enumerate(data):
        values.append(saved.step(x, y))
        if n % every == 0:
            saved.save(tmp_path / "run.pt")
    assert_same_run(([*values, *saved.flush()], saved.gather()), first)


def test_a_trainer_can_be_saved_before_its_first_step(tmp_path):
    trainer = make("greedy")
    trainer.save(tmp_path / "new.pt")
    wanted = go_on(trainer, batches(3))
    fresh = make("greedy")
    fresh.load(tmp_path / "new.pt")
    assert_same_run(go_on(fresh, batches(3)), wanted)


def contents(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_save_leaves_one_whole_folder(tmp_path):
    trainer = make("greedy")
    for x, y in batches(2):
        trainer.step(x, y)
        trainer.save(tmp_path / "run.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    before = contents(tmp_path / "run.pt")
    assert {str(file.parent) for file in before} == {".", "stage-0", "stage-1", "stage-2"}
    trainer._stages[1].optimizer.param_groups[0]["odd"] = threading_lock()  # cannot be written
    with pytest.raises(UsageError, match=r"stage 1: a checkpoint cannot hold optimizer\.param_groups\.0\.odd"):
        trainer.save(str(tmp_path / "run.pt"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert contents(tmp_path / "run.pt") == before


def test_losses_that_step_still_owes_are_kept(tmp_path):
    """Exactly, cut into micro-batches, and such as are no number."""
    data = batches(9)
    kept, resumed = make("pipedream-2bw(microbatches=3)"), make("pipedream-2bw(microbatches=3)")
    for x, y in data[:2]:
        kept.step(x, y)
    kept.step(data[2][0] * math.inf, data[2][1])
    kept.save(tmp_path / "run.pt")
    resumed.load(tmp_path / "run.pt")
    (*wanted, bad), (*found, also_bad) = kept.flush(), resumed.flush()
    assert found == wanted
    assert len(found) == 2
    assert math.isnan(bad)
    assert math.isnan(also_bad)


def threading_lock():
    import threading

    return threading.Lock()


@pytest.mark.parametrize(("other", "message"), [
    (lambda: make("overlapping"), "saved with method greedy, this trainer has method overlapping"),
    (lambda: make("greedy", seed=3), "saved with seed 0, this trainer has seed 3"),
    (lambda: make("greedy", linears(6, 5, 4)), "holds 3 stages, this trainer has 2"),
    (lambda: make("greedy", linears(6, 5, 7, 4)), "does not fit the module of stage 1.*size mismatch"),
    (lambda: make("greedy", optimizer=partial(torch.optim.Adam, lr=0.1)), "does not fit the optimizer of stage 0"),
    (lambda: make("greedy", scheduler=scheduled("multi-step")),
     "stage 0 has a scheduler here and had no scheduler there"),
    (lambda: make("greedy", [linears(6, 5)[0], nn.Identity(), *linears(5, 4)],
                  heads=[*linears(5, 4), *linears(5, 4), None]),
     "does not fit the module of stage 1"),
])  # fmt: skip
def test_a_checkpoint_of_something_else_is_refused(other, message, tmp_path):
    trainer = make("greedy")
    trainer.step(*batches(1)[0])
    trainer.save(tmp_path / "run.pt")
    other = other()
    with pytest.raises(UsageError, match=f"(?s)run.pt.*{message}"):
        other.load(tmp_path / "run.pt")


def test_a_refused_checkpoint_changes_nothing(tmp_path):
    """Stage 0 fits, stage 1 does not: stage 0 must not be half loaded either."""
    trainer = make("greedy")
    trainer.step(*batches(1)[0])
    trainer.save(tmp_path / "run.pt")
    other = make("greedy", linears(6, 5, 7, 4))
    before = copy.deepcopy(everything(other))
    with pytest.raises(UsageError):
        other.load(tmp_path / "run.pt")
    assert_equal(everything(other), before)


@pytest.mark.parametrize("spoil", ["former format", "text", "pickle", "none", "folder"])
def test_a_file_that_is_no_checkpoint(spoil, tmp_path):
    path = tmp_path / "run.pt"
    trainer = make("greedy")
    if spoil == "folder":
        path.mkdir()
    elif spoil == "former format":
        torch.save({"stretto": 1, "method": "greedy", "entered": 0, "losses": {}, "stages": []}, path)
    elif spoil != "none":
        path.write_bytes({"text": b"hello, world\n", "pickle": pickle.dumps({"a": 1}, protocol=2)}[spoil])
    expected = {"none": "no checkpoint at", "folder": r"is not a whole checkpoint: manifest\.json is missing"}
    before = copy.deepcopy(everything(trainer))
    with pytest.raises(UsageError, match=expected.get(spoil, r"is not a checkpoint but a file.*Earlier versions")):
        trainer.load(path)
    assert_equal(everything(trainer), before)
    if path.is_file():
        with pytest.raises(UsageError, match=r"run\.pt is a file, and a checkpoint a folder: remove it"):
            trainer.save(path)
        assert path.is_file()


@pytest.mark.parametrize(
    ("cut", "places"), [(True, 2), (False, 2), *(pytest.param(cut, 8, marks=pytest.mark.slow) for cut in (True, False))]
)
def test_a_checkpoint_damaged_anywhere(cut, places, tmp_path):
    """Cut off as a broken copy leaves it, or a byte changed: refused, and nothing is half loaded."""
    path = tmp_path / "run.pt"
    trainer = make("greedy")
    trainer.step(*batches(1)[0])
    trainer.save(path)
    before = copy.deepcopy(everything(trainer))
    for file in sorted(path.rglob("*")):
        if file.is_dir():
            continue
        content = file.read_bytes()
        for at in range(0, len(content), len(content) // places):
            file.write_bytes(
                content[:at] if cut else content[:at] + b"\0\1"[content[at] == 0 :][:1] + content[at + 1 :]
            )
            with pytest.raises(UsageError, match=rf"{file.name} is damaged"):
                trainer.load(path)
        file.write_bytes(content)
    assert_equal(everything(trainer), before)
    trainer.load(path)


def test_the_order_in_which_options_are_written_does_not_matter(tmp_path):
    make("overlapping(delay=1, combine=mean)").save(tmp_path / "run.pt")
    make("overlapping(combine=mean, delay=1)").load(tmp_path / "run.pt")
    make(stretto.method("overlapping", combine="mean", delay=1)).load(tmp_path / "run.pt")


# -- what may be given ------------------------------------------------------------------------------------------------


def test_stages_as_functions():
    trainer = make("greedy", [partial(nn.Linear, 6, 5), lambda: nn.Sequential(nn.ReLU(), nn.Linear(5, 4))],
                   example=torch.zeros(2, 6))  # fmt: skip
    assert [type(stage) for stage in trainer.stages] == [nn.Linear, nn.Sequential]
    trainer.step(torch.randn(6, 6), labels(torch.Generator()))


def test_heads_that_are_given_are_trained_and_the_others_built():
    mine = linears(5, 4)[0]
    trainer = make("greedy", heads=[None, mine, None])
    assert trainer.heads[1] is mine
    assert isinstance(trainer.heads[0], nn.Linear)
    before = copy.deepcopy(mine)
    trainer.step(*batches(1)[0])
    assert not torch.equal(mine.weight, before.weight)


def test_all_heads_given_need_no_example():
    stages = [nn.Conv2d(1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(8, 4))]
    head = nn.Sequential(nn.Flatten(), nn.Linear(8, 4))
    trainer = make("greedy", stages, heads=[head, None])
    trainer.step(torch.randn(3, 1, 4, 4), labels(torch.Generator(), 3))


def test_heads_follow_the_device():
    """Stages are moved to the device; heads that are given must be too."""
    trainer = make("greedy", heads=[*linears(5, 4), *linears(5, 4), None], device="meta")
    assert {p.device.type for module in everything(trainer) if module for p in module.parameters()} == {"meta"}


def test_heads_that_stretto_builds_need_an_example_only_beyond_linears():
    assert [type(h) for h in make("greedy").heads] == [nn.Linear, nn.Linear, type(None)]
    flat = [nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 4)]
    assert isinstance(make("greedy", flat).heads[0], nn.Linear)
    conv = [nn.Conv2d(1, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(8, 4))]
    with pytest.raises(UsageError, match=r"method greedy needs heads after stages \[0\].*example=x.*heads=\[...\]"):
        make("greedy", conv)
    assert make("backprop", conv).heads == [None, None]


def test_heads_have_the_stages_precision():
    assert {p.dtype for h in make("greedy").heads if h is not None for p in h.parameters()} == {torch.float64}
    half = [nn.Linear(6, 5).bfloat16(), nn.Linear(5, 4).bfloat16()]
    assert make("greedy", half).heads[0].weight.dtype == torch.bfloat16


def test_a_tuple_as_batch():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linears(6, 5)[0], linears(3, 5)[0]

        def forward(self, x, z):
            return self.a(x) + self.b(z)

    g = torch.Generator().manual_seed(0)
    x = features(g, 6, 6), features(g, 6, 3)
    trainer = make("overlapping", [Both(), *linears(5, 5, 4)], example=x)
    first = trainer.evaluate([(x, labels(g))])["loss"]
    for _ in range(30):
        trainer.step(x, labels(torch.Generator().manual_seed(0)))
    trainer.flush()
    assert trainer.evaluate([(x, labels(torch.Generator().manual_seed(0)))])["loss"] < first


@pytest.mark.parametrize("method", slow_where(lambda method: method not in FEW, METHODS))
def test_a_tuple_as_batch_comes_out_of_a_data_loader_as_a_list(method):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linears(6, 5)[0]

        def forward(self, a, b):
            return self.linear(a + b)

    (a, y), (b, _) = batches(2)
    pairs, lists = (make(method, [Sum(), *linears(5, 5, 5, 4)], example=(a, b)) for _ in range(2))
    pairs.step((a, b), y)
    lists.step([a, b], y)
    assert pairs.flush() == lists.flush()
    assert pairs.evaluate([((a, b), y)]) == lists.evaluate([([a, b], y)])


@pytest.mark.parametrize("method", slow_where(lambda method: method not in FEW, METHODS))
def test_inputs_that_are_not_contiguous(method):
    data = batches(4)
    plain, strided = (make(method, linears(6, 5, 5, 5, 4)) for _ in range(2))
    for x, y in data:
        plain.step(x, y)
        wide = torch.stack([x, x], 2).transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
        assert not wide.is_contiguous()
        strided.step(wide, y.expand(2, 6).t()[:, 0])
    assert plain.flush() == pytest.approx(strided.flush(), rel=1e-12)
    assert_equal(everything(strided), everything(plain), tolerance=1e-12)


def test_batches_are_left_as_they_are():
    x, y = batches(1)[0]
    kept = x.clone()
    x.requires_grad_()
    trainer = make("overlapping")
    trainer.step(x, y)
    trainer.flush()
    assert torch.equal(x.detach(), kept)
    assert x.grad is None


def test_training_under_no_grad_trains():
    plain, wrapped = make("greedy"), make("greedy")
    x, y = batches(1)[0]
    plain.step(x, y)
    with torch.no_grad():
        wrapped.step(x, y)
    assert_equal(everything(wrapped), everything(plain))


@pytest.mark.parametrize("method", ["backprop", "overlapping(delay=1)"])
def test_gradients_left_over_from_before_do_not_count(method):
    """A plain training loop begins with zero_grad."""
    clean, dirty = linears(6, 5, 5, 4), linears(6, 5, 5, 4)
    x, y = batches(1)[0]
    cross_entropy(run(dirty, x), y).backward()
    clean, dirty = make(method, clean), make(method, dirty)
    for trainer in (clean, dirty):
        trainer.step(x, y)
        trainer.flush()
    assert_equal(everything(dirty), everything(clean))


@pytest.mark.parametrize(("method", "workers"), in_turn(METHODS, [1, 4], rounds=2, slow=1))
def test_a_stage_may_begin_with_an_operation_in_place(method, workers):
    """As conv, norm, ReLU(inplace=True) often do once a model is cut. Trained right, or refused at once."""

    def stages(inplace):
        torch.manual_seed(0)
        first, second, third, last = linears(6, 6, 6, 6, 4)
        return [first, nn.Sequential(nn.ReLU(inplace), second), nn.Sequential(third, nn.ReLU(inplace)), last]

    example = batches(1)[0][0]
    plain = make(method, stages(False), example=example, workers=workers)
    try:
        inplace = make(method, stages(True), example=example, workers=workers)
    except UsageError as refusal:
        if "in place" not in str(refusal):
            raise
        return
    for trainer in (plain, inplace):
        for x, y in batches(3):
            trainer.step(x, y)
        trainer.flush()
    assert_equal(everything(inplace), everything(plain))


# -- refusals ---------------------------------------------------------------------------------------------------------


class Shared(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.inner = linear

    def forward(self, x):
        return self.inner(x)


ONE_HEAD = nn.Linear(5, 4)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"stages": []}, "stages is empty"),
    ({"stages": [nn.Linear(6, 5), "linear"]}, "stage 1 is str: give an nn.Module"),
    ({"stages": [lambda: 3]}, "stage 0: its function returned int, not an nn.Module"),
    ({"method": "gredy"}, "unknown method 'gredy': did you mean 'greedy'"),
    ({"method": "greedy(depth=3)"}, "no option 'depth'"),
    ({"method": "chunked(chunks=7)"}, r"chunks=7\) on 3 stages"),
    ({"device": "nonsense"}, "device 'nonsense' cannot be used here"),
    ({"workers": 0}, "workers=0 for 3 stages: choose between 1 and 3"),
    ({"workers": 4}, "workers=4 for 3 stages"),
    ({"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
     "optimizer is a SGD.*optimizer=lambda params"),
    ({"loss": nn.CrossEntropyLoss}, r"loss=.*: give a function .*, or an object of this class, CrossEntropyLoss\(\)"),
    ({"optimizer": lambda params: None}, "optimizer returned None, not a torch.optim.Optimizer"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss several times"),
    ({"heads": [None, None]}, "heads has 2 entries for 3 stages"),
    ({"heads": [None, None, nn.Linear(4, 4)]}, r"heads\[2\]: the last stage's output is the model's output"),
    ({"method": "backprop", "heads": [nn.Linear(5, 4), None, None]},
     r"heads\[0\] is given, but the method has no loss there"),
    ({"method": "overlapping", "heads": [nn.Linear(5, 4), None, None]},
     r"heads\[0\] is given.*heads go after \(1, 2\)"),
    ({"heads": [ONE_HEAD, ONE_HEAD, None]}, "share"),
    ({"method": "greedy(head=pooled)"}, r"head 'pooled' goes \[N, C, ...\]"),
    ({"method": "greedy(head=nonsense)"}, "unknown head 'nonsense'"),
    ({"stages": [nn.Linear(6, 5), nn.Linear(7, 4)], "example": torch.zeros(2, 6)},
     r"(?s)stage 1 \(Linear\) cannot take what stage 0 gives, \[2, 5\] float32: .*mat1 and mat2"),
    ({"stages": [nn.Linear(6, 5), nn.Linear(5, 4)], "example": torch.zeros(2, 9)},
     r"stage 0 \(Linear\) cannot take what the example gives, \[2, 9\] float32"),
    ({"stages": [nn.Linear(6, 5), nn.Linear(7, 4)]}, "stage 1 .* cannot take what stage 0 gives"),
    ({"stages": [Shared(lambda x: [x]), nn.Linear(5, 4)], "example": torch.zeros(2, 6)}, r"stage 0 .* returned list"),
])  # fmt: skip
def test_refused_in_the_constructor(arguments, message):
    with pytest.raises(UsageError, match=message):
        make(**arguments)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"method": 5}, "method"),
    ({"heads": [3, None, None]}, r"heads\[0\]"),
    ({"stages": nn.Linear(6, 4)}, "stages"),
    ({"stages": [nn.Linear(6, 5), Shared(lambda x: {"logits": x})], "example": torch.zeros(2, 6)}, "returned dict"),
    ({"device": None}, "device"),
    ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau"),
])  # fmt: skip
def test_slips_that_deserve_a_message(arguments, message):
    with pytest.raises(UsageError, match=message):
        make(**arguments)


def test_a_head_may_not_share_parameters_with_another_stage():
    stages = linears(6, 5, 4)
    with pytest.raises(UsageError, match="share"):
        make("greedy", stages, heads=[nn.Sequential(stages[1]), None])


def test_a_head_may_share_parameters_with_its_own_stage():
    """As a language model's unembedding does with its embedding."""

    class Transposed(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, h):
            return h @ self.linear.weight[:, :4]

    stages = linears(6, 5, 4)
    trainer = make("greedy", stages, heads=[Transposed(stages[0]), None])
    plain, last = copy.deepcopy(stages[0]), trainer.stages[1]
    optimizer = SGD(list(plain.parameters()))
    for x, y in batches(4):
        optimizer.zero_grad()
        h = plain(x)
        cross_entropy(h @ plain.weight[:, :4], y).backward()
        optimizer.step()
        trainer.step(x, y)
    assert last is stages[1]
    assert_equal([stages[0]], [plain], tolerance=1e-12)


def test_half_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="RANK is not set: start it with torchrun --nproc-per-node 4"):
        make()
    monkeypatch.setenv("WORLD_SIZE", "1")
    make()


def test_one_relu_in_several_stages_is_no_sharing():
    relu = nn.ReLU()
    a, b, c = linears(6, 5, 5, 4)
    make("backprop", [nn.Sequential(a, relu), nn.Sequential(b, relu), c]).step(*batches(1)[0])


def test_no_optimizer_for_stages_that_have_nothing_to_train():
    asked = []
    make("backprop", [nn.Flatten(), linears(6, 5)[0], nn.ReLU(), *linears(5, 4)],
         optimizer=lambda params: asked.append(len(params)) or SGD(params))  # fmt: skip
    assert asked == [2, 2]


def test_each_stage_has_its_own_optimizer_over_itself_and_its_head():
    asked = []
    trainer = make("greedy", optimizer=lambda params: asked.append(list(params)) or SGD(params))
    for parameters, stage, head in zip(asked, trainer.stages, trainer.heads, strict=True):
        own = [*stage.parameters(), *(head.parameters() if head else ())]
        assert [id(p) for p in parameters] == [id(p) for p in own]


class Fails(nn.Module):
    """Fails in the forward, or in the backward, of one step."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no way back")

    def __init__(self, where, when):
        super().__init__()
        self.where, self.when, self.calls = where, when, 0
        self.linear = linears(5, 5)[0]

    def forward(self, x):
        self.calls += self.training
        if self.calls == self.when and self.training:
            if self.where == "forward":
                raise ArithmeticError("no way forward")
            x = self.Backward.apply(x)
        return self.linear(x)


@pytest.mark.parametrize(("method", "where", "action"), [
    ("backprop", "forward", "1F2"), ("backprop", "backward", "1B2"),
    ("greedy", "forward", "1F2"), ("overlapping", "backward", "1I2"),
])  # fmt: skip
def test_an_error_in_a_stage_says_where(method, where, action):
    first, last = linears(6, 5)[0], linears(5, 4)[0]
    trainer = make(method, [first, Fails(where, 3), last], heads=None if method == "backprop" else
                   [None if method == "overlapping" else linears(5, 4)[0], linears(5, 4)[0], None])  # fmt: skip
    data = batches(3)
    trainer.step(*data[0])
    trainer.step(*data[1])
    with pytest.raises(ArithmeticError, match="no way") as error:
        trainer.step(*data[2])
    assert error.value.__notes__ == [f"in action {action}: stage 1, micro-batch 2"]


@pytest.mark.parametrize(("method", "where"), in_turn(METHODS, ["forward", "target"], rounds=2, slow=1))
def test_after_a_failed_step_training_goes_on_or_says_that_it_cannot(method, where):
    """A batch of the wrong size, caught by the script: the next steps train or refuse, never silently do neither."""
    trainer = make(method, linears(6, 5, 5, 5, 4))
    x, y = batches(1)[0]
    trainer.step(x, y)
    with pytest.raises((RuntimeError, ValueError)):
        trainer.step(x[:, :5], y) if where == "forward" else trainer.step(x, y[:3])
    before = copy.deepcopy(trainer.stages)
    try:
        values = [trainer.step(*batch) for batch in batches(trainer.lag + 4, seed=8)]
    except StrettoError:
        return
    assert values[-1] is not None
    assert not any(torch.equal(a.weight, b.weight) for a, b in zip(trainer.stages, before, strict=True))
    trainer.flush()


HEALED = ("backprop-forward", "greedy-backward", "overlapping(delay=1)-backward", "chunked-forward")


@pytest.mark.parametrize(
    ("method", "where"),
    [
        pytest.param(method, where, marks=[pytest.mark.slow] * (f"{method}-{where}" not in HEALED))
        for method, where in itertools.product(METHODS, ("forward", "backward"))
    ],
)
def test_a_checkpoint_heals_a_failed_step(method, where, tmp_path):
    """The layers above the one that fails have their gradients by then: those must not reach the next update."""

    def trainer(when):
        stages = [*linears(6, 5), nn.Sequential(*linears(5, 5), Fails(where, when), *linears(5, 5)), *linears(5, 5, 4)]
        return make(method, stages, example=batches(1)[0][0])

    data = batches(8)
    failing, sound = trainer(3), trainer(None)
    for one in (failing, sound):
        one.step(*data[0])
        one.step(*data[1])
        one.save(tmp_path / "run.pt")
    with pytest.raises(ArithmeticError):
        go_on(failing, data[2:])
    failing.load(tmp_path / "run.pt")
    assert_same_run(go_on(failing, data[2:]), go_on(sound, data[2:]))


@pytest.mark.parametrize("method", ["backprop", "gpipe", "greedy"])
@pytest.mark.parametrize("where", ["forward", "target"])
def test_a_bad_batch_that_updated_nothing_is_forgotten(method, where):
    """Caught by the script; what follows is as if it had not been tried."""
    clean, tried = make(method, linears(6, 5, 5, 4)), make(method, linears(6, 5, 5, 4))
    for step, (x, y) in enumerate(batches(4)):
        clean.step(x, y)
        if step == 2 and not (method == "greedy" and where == "forward"):
            with pytest.raises((RuntimeError, ValueError, IndexError)):
                tried.step(x[:, :5], y) if where == "forward" else tried.step(x, y[:3] if method != "gpipe" else y + 99)
        tried.step(x, y)
    clean.flush()
    tried.flush()
    assert_equal(everything(tried), everything(clean))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"workers": "2"}, "workers='2': give a whole number"), ({"workers": 2.0}, "workers=2.0"),
    ({"seed": "a"}, "seed='a'"), ({"scheduler": 3}, "scheduler=3: give a function"), ({"loss": 3}, "loss=3"),
    ({"heads": nn.Linear(2, 2)}, "heads=Linear"),
])  # fmt: skip
def test_arguments_of_another_kind(arguments, message):
    with pytest.raises(UsageError, match=message):
        make(**arguments)


def test_targets_of_several_tensors_are_cut_into_micro_batches():
    def loss(output, target):
        return cross_entropy(output, target[0]) + (output.mean(1) - target[1]).square().mean()

    data = [(x, (y, torch.linspace(0, 1, len(y), dtype=torch.float64))) for x, y in batches(4)]
    whole, cut = (make(method, linears(6, 5, 4), loss=loss) for method in ("backprop", "gpipe"))
    for x, y in data:
        assert whole.step(x, y) == pytest.approx(cut.step(x, y), abs=1e-12)
    for a, b in zip(whole.stages, cut.stages, strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=0, atol=1e-12)
    with pytest.raises(UsageError, match="a target of type str cannot be cut into 4 micro-batches"):
        cut.step(data[0][0], "cats")


# -- methods of the user's own ----------------------------------------------------------------------------------------


def test_a_schedule_that_cannot_run_is_refused_in_the_constructor():
    """Anything that can be checked is checked before training: here the update is missing, there the order is wrong."""
    from stretto.schedule import Action, Reach, Schedule

    for kinds in ("FB", "FUB", "BFU"):
        broken = stretto.Method(
            name="broken", summary="", synchronous=True, reach=lambda S: Reach((0,) * S),
            schedule=lambda S, workers, kinds=kinds: Schedule(
                tuple(tuple(Action(kind, s, 0) for kind in kinds) for s in range(S))
            ),
        )  # fmt: skip
        with pytest.raises(stretto.ScheduleError, match=r"0U0|0B0"):
            make(broken)
