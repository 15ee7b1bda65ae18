"""Update-level feedback and basis rotation equal a reference that keeps every version, from fill to drain."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import stretto
from laws.numpy_network import Network
from laws.step_rules import AdamW, Muon, Rotated, Sgd, train_versions
from pairwise import in_turn, thinned

S, STEPS, BATCH = 4, 14, 12
WIDTHS = [6, 7, 8, 7, 4]


def rate(k):
    return 0.02 / (1 + k / 5)


def falling(made):
    return torch.optim.lr_scheduler.LambdaLR(made, lambda k: 1 / (1 + k / 5))


def batches(size=BATCH):
    draw = np.random.default_rng(1)
    return [(draw.normal(size=(size, WIDTHS[0])), draw.integers(0, WIDTHS[-1], size)) for _ in range(STEPS)]


def network_of(*, bias=True):
    network = Network(WIDTHS)
    if not bias:
        network.start = [(w, np.zeros_like(b)) for w, b in network.start]
    return network


def modules(network, *, bias=True, dtype=torch.float64):
    stages = []
    for s, (w, b) in enumerate(network.start):
        linear = nn.Linear(w.shape[1], w.shape[0], bias=bias, dtype=dtype)
        linear.weight.data = torch.tensor(w, dtype=dtype)
        if bias:
            linear.bias.data = torch.tensor(b, dtype=dtype)
        stages.append(linear if s == S - 1 else nn.Sequential(linear, nn.Tanh()))
    return stages


ADAMW = partial(torch.optim.AdamW, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6)
OPTIMIZERS = {
    "sgd": (partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3), Sgd),
    "adamw": (ADAMW, AdamW),
    "muon": (partial(torch.optim.Muon, lr=0.02, momentum=0.95, weight_decay=0.1), Muon),
}


def pb(s, t):
    return t - 2 * (S - 1 - s)


def one_f_one_b(s, t):
    return t - (S - 1 - s)


def two_versions(s, t):
    return t - 1


# method: which version a forward sees, whether its backward sees the same, and the delay of a stage
METHODS = {
    "pb": (pb, False, lambda s: 2 * (S - 1 - s)),
    "pb(stash=True)": (pb, True, lambda s: 2 * (S - 1 - s)),
    "pipedream": (one_f_one_b, True, lambda s: S - 1 - s),
    "pipedream-2bw": (two_versions, True, lambda s: 1),
    "paci(every=3)": (one_f_one_b, False, lambda s: (S - 1 - s) / 3),
}


def trainer_of(stages, method, optimizer, scheduler=falling, **options):
    name, given = stretto.method(method).name, stretto.method(method).options
    chosen = stretto.method(name, **{**given, **options})
    return stretto.Trainer(stages, nn.functional.cross_entropy, optimizer, chosen, scheduler=scheduler, device="cpu")


def run(trainer, data):
    losses = [trainer.step(torch.tensor(x), torch.tensor(y)) for x, y in data]
    return [loss for loss in losses if loss is not None] + trainer.flush()


def linear_of(stage):
    return stage if isinstance(stage, nn.Linear) else stage[0]


def gathered(trainer):
    return {name: value.clone() for name, value in trainer.gather().items()}


def assert_weights(trainer, wanted):
    for stage, (w, b) in zip(trainer.stages, wanted, strict=True):
        linear = linear_of(stage)
        np.testing.assert_allclose(linear.weight.detach().numpy(), w, rtol=0, atol=1e-10)
        if linear.bias is not None:
            np.testing.assert_allclose(linear.bias.detach().numpy(), b, rtol=0, atol=1e-10)


FED = [
    ("pb", 1.5, {}),
    ("pb(stash=True)", "delay", {}),
    ("pipedream", "delay", {"warmup": 3, "finish": 10}),
    ("pipedream-2bw", 1, {}),
    ("pipedream-2bw", 2, {"warmup": 4}),
    ("paci(every=3)", "delay", {"finish": 9}),
]


@pytest.mark.parametrize(("fed", "name"), in_turn(FED, list(OPTIMIZERS), rounds=3, slow=2), ids=str)
def test_feedback_equals_the_reference(fed, name):
    """Losses, weights, and the plain sums: w + c u after the method's own steps, w after plain ones."""
    (method, feedback, phases), (make, rule) = fed, OPTIMIZERS[name]
    seen, stashed, delay = METHODS[method]
    network, data = network_of(bias=name != "muon"), batches()
    c = delay if feedback == "delay" else lambda s: feedback
    rules = [rule() for _ in range(S)]
    versions, moves, losses = train_versions(
        network, data, rules, seen, c=c, rate=rate, stashed=stashed, every=3 if "every" in method else 1, **phases
    )
    trainer = trainer_of(modules(network, bias=name != "muon"), method, make, feedback=feedback, **phases)
    np.testing.assert_allclose(run(trainer, data), losses, rtol=0, atol=1e-10)
    assert_weights(trainer, [each[-1] for each in versions])
    ahead = 0 if "finish" in phases else 1
    sums = [[w + ahead * c(s) * u for w, u in zip(versions[s][-1], moves[s][-1], strict=True)] for s in range(S)]
    before = gathered(trainer)
    with trainer.plain_sums():
        assert_weights(trainer, sums)
        summed = gathered(trainer)
    after = gathered(trainer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    same = all(torch.equal(before[key], summed[key]) for key in before)
    assert same == (not ahead)


def test_the_telescope():
    """The plain sum starts c first steps away from the start, as the first step is plain."""
    network, data, c = network_of(), batches(), 1.5
    seen, stashed, _ = METHODS["pb"]
    versions, moves, _ = train_versions(
        network, data, [Sgd() for _ in range(S)], seen, c=lambda s: c, rate=rate, stashed=stashed
    )
    for s in range(S):
        for part in range(2):
            total = sum(u[part] for u in moves[s])
            summed = versions[s][-1][part] + c * moves[s][-1][part]
            np.testing.assert_allclose(summed, versions[s][0][part] + c * moves[s][0][part] - total, atol=1e-12)


def test_feedback_is_prediction_along_the_last_change():
    """From a first step of rate 0: forward and backward at z + c (z_t - z_{t-1}), z the plain sums, without decay."""
    network, data = network_of(), batches()
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)

    def late(made):
        return torch.optim.lr_scheduler.LambdaLR(made, lambda k: float(k > 0))

    fed = trainer_of(modules(network), "pb(stash=True)", sgd, late, feedback=2)
    ahead = trainer_of(modules(network), "pb(stash=True)", sgd, late, predict="weight", horizon=2)
    np.testing.assert_allclose(run(fed, data), run(ahead, data), rtol=0, atol=1e-12)
    with fed.plain_sums():
        for key, value in ahead.gather().items():
            torch.testing.assert_close(fed.gather()[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "options", "intervals"),
    [
        ("pb", {"rotate": True, "refresh": 3}, (2, 2, 4, 6)),  # mean delay 3
        ("pipedream", {"rotate": "one-sided", "refresh": 2}, (1, 2, 3, 4)),  # mean delay 1.5
        ("pipedream-2bw", {"rotate": True, "refresh": 4}, (4, 4, 4, 4)),
        ("pb(stash=True)", {"rotate": True, "feedback": 1, "refresh": 3}, (2, 2, 4, 6)),
        ("pipedream", {"rotate": True, "refresh": 2, "warmup": 3, "finish": 11}, (1, 2, 3, 4)),
    ],
)
def test_rotation_equals_the_reference(method, options, intervals):
    """In synchronous phases matrices go on in their basis, whose averages are the optimizer's."""
    network, data = network_of(), batches()
    seen, stashed, _ = METHODS[method]
    sides = 1 if options["rotate"] == "one-sided" else 2
    rules = [Rotated(interval, sides) for interval in intervals]
    phases = {key: options[key] for key in ("warmup", "finish") if key in options}
    versions, _, losses = train_versions(
        network, data, rules, seen, c=lambda s: options.get("feedback", 0), rate=rate, stashed=stashed, **phases
    )
    trainer = trainer_of(modules(network), method, ADAMW, **options)
    np.testing.assert_allclose(run(trainer, data), losses, rtol=0, atol=1e-10)
    assert_weights(trainer, [each[-1] for each in versions])


@pytest.mark.parametrize("method", ["pb", pytest.param("paci(every=3)", marks=pytest.mark.slow)])
def test_nothing_of_it_is_plain_to_the_bit(method):
    network, data = network_of(), batches()
    ends = [
        trainer_of(modules(network), method, ADAMW, **options)
        for options in ({}, {"feedback": 0, "rotate": False}, {"feedback": 1}, {"rotate": True})
    ]
    losses = [run(trainer, data) for trainer in ends]
    weights = [torch.cat([p.ravel() for p in trainer.model.parameters()]) for trainer in ends]
    assert losses[0] == losses[1]
    assert torch.equal(weights[0], weights[1])
    assert all((weights[0] - other).abs().max() > 1e-4 for other in weights[2:])


RESUMED = [
    ("pipedream", {"rotate": True, "feedback": "delay", "refresh": 3}),
    ("paci(every=2)", {"rotate": "one-sided", "recompute": True}),
    ("pb", {"feedback": 2, "warmup": 3, "finish": 11}),
]


@pytest.mark.parametrize(("cured", "save_at"), thinned(in_turn(RESUMED, [7, 2], rounds=2), 4), ids=str)
def test_a_resumed_run_is_the_run_that_went_on(cured, save_at, tmp_path):
    """To the bit, with float32 masters of bfloat16 weights."""
    method, options = cured
    data = [(torch.tensor(x, dtype=torch.float32), torch.tensor(y)) for x, y in batches()]

    def make(seed):
        chosen = stretto.method(stretto.method(method).name, **{**stretto.method(method).options, **options})
        return stretto.Trainer(
            modules(Network(WIDTHS, seed), dtype=torch.float32), nn.functional.cross_entropy, ADAMW, chosen,
            scheduler=falling, precision="bf16", device="cpu",
        )  # fmt: skip

    one, other = make(0), make(1)
    for x, y in data[:save_at]:
        one.step(x, y)
    one.save(tmp_path / "half")
    other.step(*data[0])
    other.load(tmp_path / "half")
    for x, y in data[save_at:]:
        assert one.step(x, y) == other.step(x, y)
    assert one.flush() == other.flush()
    for a, b in zip(one.optimizers, other.optimizers, strict=True):
        pairs = zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True)
        assert all(torch.equal(p, q) and p.dtype == torch.float32 for p, q in pairs)


def test_replicas_are_one_network():
    """Two emulated replicas of half minibatches make the steps of one."""
    network, data = network_of(), batches()
    options = {"feedback": 1, "rotate": True, "refresh": 2}
    one = trainer_of(modules(network), "pb", ADAMW, **options)
    two = stretto.Trainer(
        modules(network), nn.functional.cross_entropy, ADAMW, stretto.method("pb", **options), scheduler=falling,
        mesh=stretto.Mesh(data=2), device="cpu",
    )  # fmt: skip
    np.testing.assert_allclose(run(one, data), run(two, data), rtol=0, atol=1e-10)


def test_weights_in_a_block_of_plain_sums_do_not_train(tmp_path):
    data = [(torch.tensor(x), torch.tensor(y)) for x, y in batches()]
    trainer = trainer_of(modules(network_of()), "pb", ADAMW, feedback=2)
    through = trainer_of(modules(network_of()), "pb", ADAMW, feedback=2)
    for n, (x, y) in enumerate(data):
        trainer.step(x, y)
        through.step(x, y)
        if n == 6:  # graphs in flight stay valid
            trainer.save(tmp_path / "half")
            through.flush()
        if n == 9:
            with trainer.plain_sums():
                between = trainer.evaluate(data)["loss"]
                for forbidden in (
                    lambda: trainer.step(*data[0]), trainer.flush, lambda: trainer.save(tmp_path / "other"),
                    lambda: trainer.load(tmp_path / "half"),
                ):  # fmt: skip
                    with pytest.raises(stretto.UsageError, match="outside of the block of plain_sums"):
                        forbidden()
            assert trainer.evaluate(data)["loss"] != between
    assert trainer.flush() == through.flush()
    weights = zip(trainer.model.parameters(), through.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize(
    ("method", "optimizer", "dtype", "message"),
    [
        ("pb(feedback=1)", ADAMW, torch.bfloat16, "use precision='bf16', whose float32 masters"),
        ("pb(rotate=True)", ADAMW, torch.bfloat16, "rotate with parameters of bfloat16"),
        ("pb(rotate=True)", partial(torch.optim.SGD, lr=0.1), torch.float32, "this optimizer is SGD"),
        ("pb(rotate=True)", partial(torch.optim.NAdam, lr=0.1), torch.float32, "this optimizer is NAdam"),
        ("pb(rotate=True)", partial(ADAMW, amsgrad=True), torch.float32, "use amsgrad=False"),
    ],
)
def test_optimizers_that_cannot_be_cured_are_refused(method, optimizer, dtype, message):
    with pytest.raises(stretto.UsageError, match=message):
        trainer_of(modules(network_of(), dtype=dtype), method, optimizer)
