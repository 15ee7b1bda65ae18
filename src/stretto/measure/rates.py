"""Measures what sorts of operators take: layers of each sort, forward and backward, alone and beside other workers.

Every process of a group takes part. First the first one computes while the others wait, then all do.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from stretto.cost.cluster import Rate
from stretto.cost.cure_costs import BFLOAT16, PRODUCTS, QR, factorisations
from stretto.measure.all_reduce import once, slowest
from stretto.measure.aten_costs import Operators
from stretto.measure.nonnegative_fit import fit
from stretto.nn.memory_limit import bytes_of
from stretto.optimizers import OPTIMIZERS, BasisWork

CHAIN = 4  # layers in a row, as in a stage: what starting a backward takes is shared among them
AT_LEAST = 3e-3  # seconds that one measurement takes, by repeating: processes do not leave a barrier at the same time
REPEATS, QUICK_REPEATS = 9, 3

Make = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]  # a module and its inputs


@dataclass(frozen=True)
class Case:
    """Some work of one sort: how long it takes is asked of `call`."""

    operator: str
    direction: str
    call: Callable[[], object]
    amounts: tuple[float, float, float]  # calls, FLOPs, bytes


@dataclass(frozen=True)
class MeasuredCase:
    """A measured case: seconds alone, and while all compute."""

    operator: str
    direction: str
    amounts: tuple[float, float, float]
    alone: float
    together: float
    noise: float = 0.0  # half the distance between the quartiles of its repeats, as a share of their median


class MeasuredAttention(nn.Module):
    """Attention of queries, keys and values [N, heads, T, d]."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention, [N, heads, T, d]."""
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def chain(layer: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Some layers that keep the shape of their input."""
    return nn.Sequential(*(layer() for _ in range(CHAIN))), (torch.randn(shape),)


def linear(width: int, batch: int) -> Make:
    """A chain of linear layers without bias on inputs [batch, width]."""
    return lambda: chain(partial(nn.Linear, width, width, bias=False), batch, width)


def convolution(channels: int, side: int, batch: int) -> Make:
    """A chain of 3x3 convolutions on images [batch, channels, side, side]."""
    return lambda: chain(partial(nn.Conv2d, channels, channels, 3, padding=1, bias=False), batch, channels, side, side)


def image(layer: Callable[[], nn.Module], channels: int, side: int, batch: int) -> Make:
    """A chain of layers that keep the size of images [batch, channels, side, side]."""
    return lambda: chain(layer, batch, channels, side, side)


def rows(layer: Callable[[], nn.Module], number: int, width: int) -> Make:
    """A chain of layers on rows [number, width]."""
    return lambda: chain(layer, number, width)


def attention(heads: int, tokens: int, batch: int) -> Make:
    """Attention of heads 32 wide."""
    return lambda: (MeasuredAttention(), tuple(torch.randn(batch, heads, tokens, 32) for _ in range(3)))


def embedding(vocabulary: int, width: int, tokens: int) -> Make:
    """An embedding of `tokens` tokens, [vocabulary, width]."""
    return lambda: (nn.Embedding(vocabulary, width), (torch.randint(vocabulary, (tokens,)),))


pool = partial(nn.MaxPool2d, 3, 1, padding=1)
mean = partial(nn.AvgPool2d, 3, 1, padding=1)
NORMALISED = ((16, 8, 4), (32, 16, 16), (64, 16, 32))  # channels, side, batch
LAYERS: tuple[tuple[str, Sequence[Make]], ...] = (
    ("linear", [linear(w, b) for w, b in ((64, 8), (64, 128), (256, 16), (256, 256), (1024, 16), (1024, 128))]),
    (
        "convolution",
        [convolution(c, s, b) for c, s, b in ((16, 8, 4), (16, 32, 8), (32, 8, 32), (64, 16, 16), (128, 4, 16))],
    ),
    ("batch-norm", [image(partial(nn.BatchNorm2d, c), c, s, b) for c, s, b in NORMALISED]),
    ("layer-norm", [rows(partial(nn.LayerNorm, w), n, w) for n, w in ((32, 64), (512, 128), (1024, 512))]),
    ("attention", [attention(2, 32, 2), attention(4, 64, 8), attention(4, 256, 4)]),
    ("embedding", [embedding(512, 64, 128), embedding(2048, 128, 1024), embedding(4096, 256, 4096)]),
    ("elementwise", [rows(nn.ReLU, n, 1024) for n in (1, 16, 256, 1024)]),
    ("transcendental", [*(rows(nn.GELU, n, 1024) for n in (1, 16, 256)), rows(partial(nn.Softmax, dim=1), 64, 1024)]),
    ("pooling", [*(image(pool, c, s, b) for c, s, b in ((16, 8, 4), (64, 16, 8))), image(mean, 32, 16, 8)]),
)
FACTORISED = (64, 128, 256, 512)  # columns of the square matrices whose QR factorisations are measured
TURNED = ((64, 64), (64, 512), (256, 64), (256, 256), (512, 64))  # a basis' side, and the matrix's other one
LOW = (32, 128, 256)  # sides of square matrices whose products in bfloat16 are measured, as Muon computes them
COPIES = (1 << 12, 1 << 18, 1 << 22, 1 << 24)  # bytes
WEIGHTS = (((64,), 8), ((256, 256), 4), ((1024, 1024), 2))  # shape and number of the tensors that are updated
STEPS: Mapping[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def cases(*, quick: bool) -> Iterator[Case]:
    """Everything that is measured; the smallest of each sort if it is to be quick."""
    for operator, makes in LAYERS:
        for make in makes[: 3 if quick else None]:
            yield from passes(operator, *make())
    for size in COPIES:
        tensor = torch.zeros(size // 4)
        yield Case("copy", "forward", tensor.clone, (1, 0, 2 * size))
    for columns in FACTORISED[: 3 if quick else None]:
        yield factorisation(columns)
    for side, other in TURNED[: 3 if quick else None]:
        yield product(PRODUCTS, torch.randn(side, side), torch.randn(side, other))
    for side in LOW:
        yield product(BFLOAT16, torch.randn(side, side).bfloat16(), torch.randn(side, side).bfloat16())
    for family, step in STEPS.items():
        for shape, number in WEIGHTS[: 2 if quick else None]:
            yield update(family, step, shape, number)


def passes(operator: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Case]:
    """A layer's forward and its whole backward."""
    leaves = [each.requires_grad_(each.is_floating_point()) for each in inputs]
    with Operators() as forward:
        output = module(*leaves)
    wanted = [*module.parameters(), *(leaf for leaf in leaves if leaf.requires_grad)]
    backward = partial(torch.autograd.grad, output, wanted, torch.ones_like(output), retain_graph=True)
    with Operators() as back:
        backward()
    for direction, done, call in (("forward", forward, partial(module, *leaves)), ("backward", back, backward)):
        calls, flops, num_bytes = done.done[operator]
        assert calls, f"{operator} has no {direction} of its sort: {dict(done.done)}"
        yield Case(operator, direction, call, (calls, flops, num_bytes))


def factorisation(columns: int) -> Case:
    """A QR factorisation with its Q, as optimizers with a basis refresh it."""
    matrix = torch.randn(columns, columns)
    work = factorisations(BasisWork.of(columns, columns, [columns]), matrix.element_size())
    return Case(QR, "forward", partial(torch.linalg.qr, matrix), (work.calls, work.flops.at(0), work.bytes.at(0)))


def product(sort: str, one: Tensor, other: Tensor) -> Case:
    """A product of matrices, as optimizers of whole matrices compute it."""
    numbers = one.numel() + other.numel() + len(one) * other.shape[1]
    return Case(
        sort,
        "forward",
        partial(torch.mm, one, other),
        (1, 2 * one.numel() * other.shape[1], one.element_size() * numbers),
    )


def update(
    family: str, step: Callable[[Sequence[Tensor]], torch.optim.Optimizer], shape: tuple[int, ...], number: int
) -> Case:
    """A step of an optimizer."""
    parameters = [nn.Parameter(torch.zeros(shape)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    moved = OPTIMIZERS[family].accesses * bytes_of(parameters)
    return Case(family, "update", step(parameters).step, (number, 0, moved))


def measure_rates(group: dist.ProcessGroup, *, quick: bool = False, tell: Callable[[], object]) -> list[MeasuredCase]:
    """Measure all cases on all processes of a group: medians of repeats in which cases take turns."""
    torch.manual_seed(0)
    every = list(cases(quick=quick))
    loops = enough(group, every, AT_LEAST / (10 if quick else 1))
    turns = []
    for turn in range(turns_of(quick)):
        taken: dict[int, tuple[float, float]] = {}
        for index in shuffled(len(every), turn):
            run = partial(repeat, every[index].call, loops[index])
            alone = once(group, run if group.rank() == 0 else nothing)
            taken[index] = (alone if group.rank() == 0 else 0.0, once(group, run))
        turns.append([time for index in range(len(every)) for time in taken[index]])
        tell()
    columns = list(zip(*slowest(group, turns), strict=True))
    return [point(case, loops[index], columns[2 * index], columns[2 * index + 1]) for index, case in enumerate(every)]


def turns_of(quick: bool) -> int:
    """How often each case is measured."""
    return QUICK_REPEATS if quick else REPEATS


def nothing() -> None:
    """What the others do while one computes."""


def repeat(call: Callable[[], object], times: int) -> None:
    """Make a call `times` times."""
    for _ in range(times):
        call()


def shuffled(number: int, turn: int) -> list[int]:
    """Another order each turn, the same on every process."""
    order: list[int] = torch.randperm(number, generator=torch.Generator().manual_seed(turn)).tolist()
    return order


def enough(group: dist.ProcessGroup, every: Sequence[Case], seconds: float) -> list[int]:
    """How often each case is called in one measurement, the same on every process."""
    times = []
    for case in every:
        case.call()  # the first one makes room
        times.append(once(group, case.call))
    return [max(1, round(seconds / max(longest, 1e-7))) for longest in slowest(group, [times])[0]]


def point(case: Case, loops: int, alone: Sequence[float], together: Sequence[float]) -> MeasuredCase:
    """The medians of a case's repeats."""
    middle = statistics.median(alone)
    low, _, high = statistics.quantiles(alone, n=4)
    noise = (high - low) / 2 / middle
    return MeasuredCase(
        case.operator, case.direction, case.amounts, middle / loops, statistics.median(together) / loops, noise
    )


def rates_of(points: Sequence[MeasuredCase]) -> dict[str, dict[str, Rate]]:
    """A rate for each sort of operator and direction, from the times alone; contention is the median of the ratios."""
    found: dict[str, dict[str, Rate]] = {}
    for key in dict.fromkeys((each.operator, each.direction) for each in points):
        own = [each for each in points if (each.operator, each.direction) == key]
        line = fit([each.amounts for each in own], [each.alone for each in own])
        contention = statistics.median(each.together / each.alone for each in own)
        seconds = dict(zip(("per_call", "per_flop", "per_byte"), line.rates, strict=True))
        rate = Rate(**seconds, contention=max(1.0, contention), residual=line.residual)
        found.setdefault(key[0], {})[key[1]] = rate
    return found
