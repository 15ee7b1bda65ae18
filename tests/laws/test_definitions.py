"""Each local method equals its definition, taken from the paper word by word: every loss has a graph of its own.

The reference draws a shared stage once for each loss that trains it (figure 2 of Laskin, Metz et al. 2020), on
duplicates of its parameters, and uses neither schedules nor split backwards.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import stretto
from laws.networks import NETWORKS, assert_equal, features, labels, stepped_together
from pairwise import each_once, in_turn, pairwise, thinned
from stretto.schedule import Action, Reach, Schedule

STEPS = 8
STAGES = 4
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)


def as_tuple(values):
    return values if isinstance(values, tuple) else (values,)


class Definition:
    """`segments`: for each loss the first and the last stage it trains; its head stands on the last."""

    def __init__(self, stages, heads, segments, loss, optimizer, *, mean=False, delay=0, weight=1.0):
        self.stages, self.heads = copy.deepcopy(list(stages)), copy.deepcopy(list(heads))
        self.segments, self.loss, self.mean, self.delay, self.weight = segments, loss, mean, delay, weight
        self.parameters = [
            [p for part in (stage, head) if part is not None for p in part.parameters() if p.requires_grad]
            for stage, head in zip(self.stages, self.heads, strict=True)
        ]
        self.optimizers = [optimizer(parameters) if parameters else None for parameters in self.parameters]
        self.waiting = []

    def step(self, x, y):
        """Gradients at the weights as they stand; applied now, or after the next minibatch's are taken."""
        self.waiting.append(self.gradients(as_tuple(x), y))
        if len(self.waiting) > self.delay:
            self.apply(self.waiting.pop(0))
        return self.output_loss

    def flush(self):
        while self.waiting:
            self.apply(self.waiting.pop(0))

    def gradients(self, x, y):
        total = {}
        inputs = self.inputs(x)
        for low, high in self.segments:
            modules = [(self.stages[s], self.share(s)) for s in range(low, high + 1)]
            if self.heads[high] is not None:
                modules.append((self.heads[high], 1))
            values, duplicates = inputs[low], []
            for module, share in modules:
                leaves = {
                    name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in module.named_parameters()
                }
                buffers = {name: b.clone() for name, b in module.named_buffers()}
                values = as_tuple(functional_call(module, (leaves, buffers), values))
                pairs = zip(module.parameters(), leaves.values(), strict=True)
                duplicates += [(p, leaf, share) for p, leaf in pairs if p.requires_grad]
            value = self.loss(values[0], y)
            if high == len(self.stages) - 1:
                self.output_loss = value.item()
            else:
                value = self.weight * value
            if duplicates:
                found = torch.autograd.grad(value, [leaf for _, leaf, _ in duplicates], allow_unused=True)
                for (parameter, _, share), gradient in zip(duplicates, found, strict=True):
                    if gradient is not None:
                        total[parameter] = total.get(parameter, 0) + share * gradient
        return total

    def inputs(self, x):
        """What each stage is given: one forward, which moves the statistics of norms, cut at every boundary."""
        given = []
        with torch.no_grad():
            for stage in self.stages:
                given.append(x)
                x = as_tuple(stage(*x))
        return given

    def share(self, stage):
        return 1 / sum(low <= stage <= high for low, high in self.segments) if self.mean else 1

    def apply(self, gradients):
        for optimizer, parameters in zip(self.optimizers, self.parameters, strict=True):
            for parameter in parameters:
                parameter.grad = gradients.get(parameter)
            if optimizer is not None:
                optimizer.step()


METHODS = {
    "backprop": {"segments": [(0, 3)]},
    "greedy": {"segments": [(0, 0), (1, 1), (2, 2), (3, 3)]},
    "overlapping": {"segments": [(0, 1), (1, 2), (2, 3)]},
    "overlapping(combine=mean)": {"segments": [(0, 1), (1, 2), (2, 3)], "mean": True},
    "overlapping(delay=1)": {"segments": [(0, 1), (1, 2), (2, 3)], "delay": 1},
    "overlapping(combine=mean, delay=1)": {"segments": [(0, 1), (1, 2), (2, 3)], "mean": True, "delay": 1},
    "chunked": {"segments": [(0, 1), (2, 3)]},
    "chunked(chunks=3)": {"segments": [(0, 1), (2, 2), (3, 3)]},
    "chunked(chunks=4)": {"segments": [(0, 0), (1, 1), (2, 2), (3, 3)]},
}

IN_PARTS = {  # cut into micro-batches, or with pipelines inside
    "greedy(microbatches=3)": METHODS["greedy"],
    "overlapping(microbatches=2)": METHODS["overlapping"],
    "overlapping(combine=mean, microbatches=3)": METHODS["overlapping(combine=mean)"],
    "chunked(microbatches=2)": METHODS["chunked"],
    "chunked(chunks=3, inside=zb-h1(microbatches=3))": METHODS["chunked(chunks=3)"],
    "chunked(inside=gpipe(microbatches=2, recompute=True))": METHODS["chunked"],
    "chunked(inside=interleaved(microbatches=2))": METHODS["chunked"],
    "chunked(inside=zb-v(microbatches=3))": METHODS["chunked"],
}
SUPERVISED = {  # heads from which nothing is detached
    "backprop(head=auto, head_weight=0.3)": {"segments": [(0, 0), (0, 1), (0, 2), (0, 3)], "weight": 0.3},
    "1f1b(microbatches=3, head_weight=0.5, head_at=1)": {"segments": [(0, 1), (0, 3)], "weight": 0.5},
    "gpipe(microbatches=2, head=auto)": {"segments": [(0, 0), (0, 1), (0, 2), (0, 3)]},
    "zb-h1(microbatches=2, head_weight=2, head_at='0+2')": {"segments": [(0, 0), (0, 2), (0, 3)], "weight": 2.0},
    "interleaved(microbatches=2, head_at=1, recompute=True)": {"segments": [(0, 1), (0, 3)]},
}


def compare(stages, loss, batches, method, definition, *, optimizer=SGD, flush_after=None, **options):
    options = {"example": batches[0][0], **options}
    trainer = stretto.Trainer(stages, loss, optimizer, method, **options)
    reference = Definition(trainer.stages, trainer.heads, loss=loss, optimizer=optimizer, **definition)
    losses, returned = stepped_together(reference, trainer, batches, flush_after)
    reference.flush()
    rest = trainer.flush()
    assert_equal([*trainer.stages, *trainer.heads], [*reference.stages, *reference.heads], tolerance=1e-12)
    lag = trainer.lag
    assert returned[:lag] == [None] * min(lag, len(returned))
    assert [*returned[lag:], *rest] == pytest.approx(losses, rel=1e-11)
    return trainer, reference


@pytest.mark.parametrize(("method", "name"), in_turn(METHODS, list(NETWORKS), rounds=2, slow=1))
def test_a_method_is_its_definition(method, name):
    network = NETWORKS[name]
    batches = network.batches(STEPS + 3)
    compare(network.stages(STAGES), network.loss, batches, method, METHODS[method])


@pytest.mark.parametrize(
    ("method", "name"), in_turn([*IN_PARTS, *SUPERVISED], ["mlp", "transformer", "tuples"], rounds=3, slow=2)
)
def test_so_it_is_in_micro_batches_and_with_heads_that_detach_nothing(method, name):
    network = NETWORKS[name]
    compare(network.stages(STAGES), network.loss, network.batches(STEPS), method, {**IN_PARTS, **SUPERVISED}[method])


HEADS = [("auglocal", "transformer"), ("auglocal", "tuples"), ("two-layer", "cnn")]


@pytest.mark.parametrize(("case", "method"), in_turn(HEADS, ["greedy", "overlapping"], rounds=2, slow=1), ids=str)
def test_so_it_is_with_other_heads(case, method):
    head, name = case
    network = NETWORKS[name]
    batches = network.batches(STEPS)
    compare(network.stages(STAGES), network.loss, batches, f"{method}(head={head})", METHODS[method])


@pytest.mark.parametrize(
    ("method", "num_stages"), in_turn(["overlapping(combine=mean)", "overlapping(delay=1)"], [2, 3], rounds=2, slow=1)
)
def test_few_stages(num_stages, method):
    network = NETWORKS["cnn"]
    segments = [(p, p + 1) for p in range(num_stages - 1)]
    definition = {**METHODS[method], "segments": segments}
    compare(network.stages(num_stages), network.loss, network.batches(STEPS), method, definition)


@pytest.mark.parametrize("method", thinned(METHODS, 3, first=1))
def test_adaptive_optimizers_have_one_state_a_stage(method):
    network = NETWORKS["mlp"]
    adam = partial(torch.optim.AdamW, lr=1e-2)
    compare(network.stages(4), network.loss, network.batches(STEPS), method, METHODS[method], optimizer=adam)


@pytest.mark.parametrize(("method", "flush_after"), in_turn(METHODS, (1, 0, 4), rounds=2, slow=1))
def test_a_flush_in_the_middle_finishes_what_is_in_flight_and_no_more(method, flush_after):
    network = NETWORKS["mlp"]
    compare(network.stages(4), network.loss, network.batches(STEPS), method, METHODS[method], flush_after=flush_after)


def test_statistics_of_norms_move_once_a_step():
    network = NETWORKS["cnn"]
    for method in METHODS:
        stages, batches = network.stages(4), network.batches(5)
        trainer = stretto.Trainer(stages, network.loss, SGD, method, example=batches[0][0])
        for x, y in batches:
            trainer.step(x, y)
        trainer.flush()
        counts = [b.item() for stage in trainer.stages for n, b in stage.named_buffers() if "num_batches" in n]
        assert counts == [5, 5, 5], method


# -- gradients that travel further than one stage, from heads that overlap ------------------------------------------


def sweeping(num_stages, num_workers):
    """Forward up, input gradients down, weight gradients and updates: valid for any reach and placement."""
    cut = torch.arange(num_stages).tensor_split(num_workers)

    def body(stages):
        for kind in "F", "I", "W":
            for stage in stages if kind == "F" else reversed(stages):
                yield Action(kind, stage, 0)
        yield from (Action("U", stage, 0) for stage in stages)

    return Schedule(tuple(tuple(body(part.tolist())) for part in cut))


def custom(hops, **options):
    options = {"schedule": sweeping, "synchronous": False, **options}
    return stretto.Method(name="custom", summary="heads anywhere", reach=lambda _: Reach(hops), **options)


REACHES = [
    (None, None, 2, 2),
    (0, 1, 2, 2),
    (0, 1, 2, 3),
    (None, None, None, 3),
    (0, None, 2, 3),
    (None, 1, 0, 3),
    (0, 0, 2, 1),
]


@pytest.mark.parametrize(
    ("hops", "workers", "combine"), each_once(pairwise(REACHES, (1, 2, 4), ("sum", "mean"))), ids=str
)
def test_any_reach_is_its_definition(hops, workers, combine):
    segments = [(stage - far, stage) for stage, far in enumerate(hops) if far is not None]
    network = NETWORKS["mlp"] if workers > 1 else NETWORKS["tuples"]
    compare(
        network.stages(4), network.loss, network.batches(STEPS + 1), custom(hops, combine=combine),
        {"segments": segments, "mean": combine == "mean"}, workers=workers,
    )  # fmt: skip


def in_pieces(num_stages, pieces):
    """Each micro-batch forward and backward in its halves, one after the other; one update for all."""
    return Schedule(
        tuple(
            (*(Action(kind, s, m) for m in range(pieces) for kind in "FIW"), Action("U", s, pieces - 1))
            for s in range(num_stages)
        ),
        per_turn=pieces,
    )


@pytest.mark.parametrize(
    ("hops", "combine"), in_turn([(None, 1, 1, 1), (0, 1, 2, 2)], ["sum", "mean"], rounds=2, slow=1), ids=str
)
def test_a_minibatch_in_pieces_gives_the_gradients_of_the_whole(hops, combine):
    """Six examples in four pieces of two and one; the gradients of stages and heads wait for all of them."""
    segments = [(stage - far, stage) for stage, far in enumerate(hops) if far is not None]
    network = NETWORKS["mlp"]
    method = custom(hops, combine=combine, schedule=lambda S, workers: in_pieces(S, 4))
    compare(network.stages(4), network.loss, network.batches(STEPS + 1), method,
            {"segments": segments, "mean": combine == "mean"})  # fmt: skip


# -- stages that are not a chain of trainable layers ------------------------------------------------------------------


def part(kind):
    return {
        "linear": lambda: nn.Linear(6, 6),
        "relu": nn.ReLU,
        "identity": nn.Identity,
        "flatten": nn.Flatten,
        "frozen": lambda: nn.Linear(6, 6).requires_grad_(False),
        "out": lambda: nn.Linear(6, 4),
    }[kind]().double()


ROWS = [
    ("flatten", "linear", "relu", "out"),
    ("relu", "linear", "identity", "out"),
    ("linear", "frozen", "linear", "out"),
    ("frozen", "linear", "frozen", "out"),
    ("identity", "identity", "linear", "out"),
    ("linear", "relu", "out", "identity"),
]


@pytest.mark.parametrize(("method", "kinds"), in_turn(METHODS, ROWS, rounds=3, slow=2), ids=str)
def test_stages_without_trainable_parameters_pass_gradients_on(method, kinds):
    torch.manual_seed(0)
    stages = [part(kind) for kind in kinds]
    g = torch.Generator().manual_seed(3)
    batches = [(features(g, 6, 6), labels(g)) for _ in range(STEPS)]
    frozen = copy.deepcopy([s for s, kind in zip(stages, kinds, strict=True) if kind == "frozen"])
    trainer, _ = compare(stages, cross_entropy, batches, method, METHODS[method])
    kept = [s for s, kind in zip(trainer.stages, kinds, strict=True) if kind == "frozen"]
    assert_equal(kept, frozen)


class Unused(nn.Module):
    """Has a parameter that its forward never touches."""

    def __init__(self):
        super().__init__()
        self.linear, self.spare = nn.Linear(6, 6), nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).tanh()


@pytest.mark.parametrize("method", thinned(METHODS, 3, first=1))
def test_parameters_that_no_forward_uses_stay_as_they_are(method):
    torch.manual_seed(0)
    stages = [Unused().double(), Unused().double(), Unused().double(), part("out")]
    before = copy.deepcopy([stage.spare for stage in stages[:3]])
    g = torch.Generator().manual_seed(3)
    batches = [(features(g, 6, 6), labels(g)) for _ in range(STEPS)]
    trainer, _ = compare(stages, cross_entropy, batches, method, METHODS[method])
    assert_equal([stage.spare for stage in trainer.stages[:3]], before)


class Tied(nn.Module):
    """One weight, used twice in one stage."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("method", thinned(["backprop", "greedy", "overlapping", "overlapping(delay=1)"], 2, first=1))
def test_weights_tied_within_a_stage(method):
    torch.manual_seed(0)
    stages = [Tied().double(), Tied().double(), Tied().double(), part("out")]
    g = torch.Generator().manual_seed(3)
    batches = [(features(g, 6, 6), labels(g)) for _ in range(STEPS)]
    compare(stages, cross_entropy, batches, method, METHODS[method])
