"""Mistakes made by hand in plain PyTorch, written beside the hypotheses. Nothing here uses Stretto."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from networks import IGNORED, Case, Setup
from torch import Tensor
from torch.nn import functional

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
Grads = dict[str, Tensor | None]


def plain(s: Setup, rows: Any = slice(None), loss: Callable[[Any, Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """Gradients of some rows by themselves."""
    s.model.zero_grad(set_to_none=True)
    (loss or s.loss)(s.model(s.inputs[rows]), s.target[rows]).backward()
    return {name: p.grad.clone() for name, p in s.model.named_parameters() if p.grad is not None}


def cuts(s: Setup, pieces: int) -> list[slice]:
    """Rows of equal pieces, as torch.tensor_split cuts."""
    ends = [0]
    for part in torch.arange(len(s.target)).tensor_split(pieces):
        ends.append(ends[-1] + len(part))
    return [slice(a, b) for a, b in pairwise(ends)]


def count(s: Setup, rows: Any) -> float:
    return float((s.target[rows] != IGNORED).sum())


def weighted(s: Setup, pieces: int, factors: Sequence[float], *, counted: bool = True, each: Any = None) -> Grads:
    """The sum of the pieces' gradients, each by its share of what counts (or by 1 / pieces) and a factor."""
    total: dict[str, Tensor] = {}
    whole = count(s, slice(None))
    for rows, factor in zip(cuts(s, pieces), factors, strict=True):
        share = count(s, rows) / whole if counted else 1 / pieces
        made = plain(s, rows)
        made = each(made) if each else made
        for name, g in made.items():
            total[name] = total.get(name, 0) + share * factor * g
    return total


def norm(grads: dict[str, Tensor], names: Any = None) -> float:
    return math.sqrt(sum(float(grads[n].double().square().sum()) for n in (names or grads)))


def clipped(grads: dict[str, Tensor], bound: float, names: Any = None) -> dict[str, Tensor]:
    factor = min(1.0, bound / (norm(grads, names) + 1e-6))
    return {n: g * factor if names is None or n in names else g for n, g in grads.items()}


def scaled_of(s: Setup, factor: float, prefix: Sequence[str] = ("",)) -> Grads:
    return {n: g * factor if n.startswith(tuple(prefix)) else g for n, g in plain(s).items()}


def two_uses(s: Setup) -> tuple[Tensor, Tensor]:
    """The gradient of the embedding as embedding and as output layer."""
    untied = copy.deepcopy(s.model)
    untied.head.weight = torch.nn.Parameter(untied.words.weight.detach().clone())
    s.loss(untied(s.inputs), s.target).backward()
    return untied.words.weight.grad, untied.head.weight.grad


def tied(s: Setup, first: float, last: float) -> Grads:
    a, b = two_uses(s)
    return plain(s) | {"words.weight": first * a + last * b}


def earlier(s: Setup, size: float = 0.02) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(7)
    noise = {n: torch.randn(p.shape, generator=draw).to(p.dtype) for n, p in s.model.named_parameters()}
    return {"earlier": {n: p.detach() * (1 + size * noise[n]) for n, p in s.model.named_parameters()}}


def with_earlier(s: Setup, chosen: Callable[[str], bool] = lambda _: True) -> Setup:
    old = earlier(s)["earlier"]
    with torch.no_grad():
        for name, p in s.model.named_parameters():
            if chosen(name):
                p.copy_(old[name])
    return s


def frozen(s: Setup, names: Sequence[str], grads: Grads, how: Any = None) -> Grads:
    return {
        n: (None if how is None else torch.zeros_like(g)) if n.startswith(tuple(names)) else g for n, g in grads.items()
    }


def by_stage(s: Setup, bound: float, edges: Sequence[int], grads: Any = None) -> Grads:
    grads = plain(s) if grads is None else grads
    names = list(grads)
    for a, b in zip([0, *edges], [*edges, len(names)], strict=True):
        part = clipped({n: grads[n] for n in names[a:b]}, bound)
        grads |= part
    return grads


def before(s: Setup, pieces: int, bound: float) -> Grads:
    return weighted(s, pieces, [1.0] * pieces, counted=False, each=partial(clipped, bound=bound))


def statistics(s: Setup, pieces: int, factor: float = 1.0) -> Grads:
    return weighted(s, pieces, [factor] * pieces)


def shift(s: Setup, by: int) -> Grads:
    target = torch.roll(s.target, by, 1)
    target[:, by:] = IGNORED
    return plain(s._replace(target=target))


def padded(s: Setup, what: str) -> Grads:
    if what == "count":
        return {n: g * count(s, slice(None)) / s.target.numel() for n, g in plain(s).items()}
    target = torch.where(s.target == IGNORED, torch.zeros_like(s.target), s.target)
    return plain(s._replace(target=target))


def decayed(s: Setup, decay: float, grads: Any = None) -> Grads:
    grads = grads or plain(s)
    return {n: grads[n] + decay * p.detach() for n, p in s.model.named_parameters()}


def summed_in(s: Setup, dtype: torch.dtype, pieces: int) -> Grads:
    total: Grads = {}
    for rows in cuts(s, pieces):
        share = count(s, rows) / count(s, slice(None))
        for n, g in plain(s, rows).items():
            total[n] = total.get(n, torch.zeros_like(g, dtype=dtype)) + (share * g).to(dtype)
    return {n: g.to(F32) for n, g in total.items()}


def evaluated(s: Setup) -> Grads:
    s.model.eval()
    return plain(s)


def swapped(s: Setup, one: str, other: str, grads: Any = None) -> Grads:
    grads = grads or plain(s)
    made = dict(grads)
    for n in grads:
        if n.startswith(one):
            twin = other + n.removeprefix(one)
            made[n], made[twin] = grads[twin], grads[n]
    return made


def vectors(s: Setup, rank: int, of: int) -> Grads:
    """Norms' and biases' gradients of one share of the tokens, as sequence parallelism leaves them before its sum."""
    grads = plain(s)
    for name, module in s.model.named_modules():
        if not isinstance(module, torch.nn.LayerNorm | torch.nn.Linear) or getattr(module, "bias", None) is None:
            continue
        seen: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(lambda m, i, o, seen=seen: seen.update(x=i[0].detach())),
            module.register_full_backward_hook(lambda m, i, o, seen=seen: seen.update(g=o[0].detach())),
        ]
        plain(s)
        [hook.remove() for hook in hooks]
        x, g = (seen[key].tensor_split(of, dim=1)[rank] for key in "xg")
        grads[name + ".bias"] = g.flatten(0, 1).sum(0)
        if isinstance(module, torch.nn.LayerNorm):
            grads[name + ".weight"] = (g * functional.layer_norm(x, x.shape[-1:])).flatten(0, 1).sum(0)
    return grads


def c(title: str, network: str, dtype: torch.dtype, make: Any, truth: str, **options: Any) -> Case:
    chosen = options.pop("of", None)
    made = (lambda s: {**options, **chosen(s)}) if chosen else options
    return Case(title, network, dtype, make, tuple(truth.split()), made)


CASES = [
    c("summed, not averaged", "mlp", F64, lambda s: scaled_of(s, 4), "scaled", microbatches=4),
    c("averaged twice", "gpt", F32, lambda s: scaled_of(s, 1 / 8), "scaled", microbatches=8),
    c("two stages divided twice", "mlp", F64, lambda s: scaled_of(s, 0.25, ["0", "1"]), "scaled", microbatches=4),
    c("loss scale left in", "cnn", F32, lambda s: scaled_of(s, 1024.0), "scaled", loss_scale=1024.0),
    c("replicas summed", "gpt", F64, lambda s: scaled_of(s, 2.0), "scaled", replicas=2),
    c("bf16 averaged twice", "gpt", BF16, lambda s: scaled_of(s, 0.25), "scaled", microbatches=4),
    c(
        "micro-batch 2 dropped",
        "mlp",
        F64,
        lambda s: weighted(s, 4, [1, 1, 0, 1]),
        "microbatches-missing",
        microbatches=4,
    ),
    c("only the last", "gpt", F32, lambda s: weighted(s, 4, [0, 0, 0, 1]), "microbatches-missing", microbatches=4),
    c(
        "first two of 8 dropped",
        "gpt",
        F64,
        lambda s: weighted(s, 8, [0, 0] + [1] * 6),
        "microbatches-missing",
        microbatches=8,
    ),
    c("bf16 one dropped", "mlp", BF16, lambda s: weighted(s, 4, [1, 0, 1, 1]), "microbatches-missing", microbatches=4),
    c("micro-batch 0 twice", "mlp", F32, lambda s: weighted(s, 4, [2, 1, 1, 1]), "microbatches-twice", microbatches=4),
    c("replica 1 alone", "gpt", F32, lambda s: plain(s, cuts(s, 2)[1]), "replicas-missing", replicas=2),
    c("replica 3 of 4 lost", "mlp", F64, lambda s: weighted(s, 4, [1, 1, 1, 0]), "replicas-missing", replicas=4),
    c("mean of means", "gpt", F64, lambda s: weighted(s, 4, [1] * 4, counted=False), "mean-of-means", microbatches=4),
    c(
        "mean of replicas' means",
        "gpt",
        F32,
        lambda s: weighted(s, 2, [1] * 2, counted=False),
        "mean-of-means",
        replicas=2,
    ),
    c("embedding's use lost", "gpt", F64, lambda s: tied(s, 0, 1), "tie-missing"),
    c("output layer's use lost", "gpt", F32, lambda s: tied(s, 1, 0), "tie-missing", stages=2),
    c("tied summed twice", "gpt", F64, lambda s: tied(s, 2, 2), "tie-twice"),
    c("embedding's use twice", "gpt", F32, lambda s: tied(s, 2, 1), "tie-twice"),
    c("stale", "mlp", F64, lambda s: plain(with_earlier(s)), "stale", of=earlier),
    c("stale in bf16 sizes", "gpt", F32, lambda s: plain(with_earlier(s)), "stale", of=earlier),
    c(
        "first half stale",
        "gpt",
        F64,
        lambda s: plain(with_earlier(s, lambda n: n < "blocks.2" or n[0] in "wp")),
        "stale",
        of=earlier,
    ),
    c("stages clip alone", "mlp", F64, lambda s: by_stage(s, 0.1, [4]), "clipped-by-stage", clip=0.1, stages=2),
    c("stages clip, cut told", "cnn", F32, lambda s: by_stage(s, 0.05, [10]), "clipped-by-stage", clip=0.05, cut=["4"]),
    c("replicas clip", "gpt", F64, lambda s: before(s, 2, 0.5), "clipped-before-averaging", clip=0.5, replicas=2),
    c(
        "micro-batches clip",
        "mlp",
        F64,
        lambda s: before(s, 4, 0.1),
        "clipped-before-averaging",
        clip=0.1,
        microbatches=4,
    ),
    c("norms of pieces", "cnn", F64, lambda s: statistics(s, 4), "statistics-by-microbatch", microbatches=4),
    c("norms of replicas", "cnn", F32, lambda s: statistics(s, 2), "statistics-by-microbatch", replicas=2),
    c("evaluation", "cnn", F64, evaluated, "evaluation-mode"),
    c("shifted twice", "gpt", F64, lambda s: shift(s, -1), "labels-shifted"),
    c("padding as word 0", "gpt", F32, lambda s: padded(s, "loss"), "padding-counted"),
    c("divided by all", "gpt", F64, lambda s: padded(s, "count"), "padding-counted"),
    c("frozen head", "mlp", F32, lambda s: frozen(s, ["3"], plain(s)), "frozen"),
    c("zeros in a block", "gpt", F64, lambda s: frozen(s, ["blocks.1"], plain(s), "zeros"), "frozen"),
    c("decay in the gradient", "mlp", F64, lambda s: decayed(s, 0.01), "decay-coupled"),
    c("decay in float32", "gpt", F32, lambda s: decayed(s, 0.1), "decay-coupled"),
    c("sums in bf16", "mlp", F32, lambda s: summed_in(s, BF16, 4), "low-precision", microbatches=4),
    c("sums in fp16", "gpt", F32, lambda s: summed_in(s, torch.float16, 8), "low-precision", microbatches=8),
    c("layers swapped", "mlp", F64, lambda s: swapped(s, "1.", "2."), "stages-swapped"),
    c("blocks swapped", "gpt", F32, lambda s: swapped(s, "blocks.0.", "blocks.3."), "stages-swapped"),
    c("norms not summed", "gpt", F64, lambda s: vectors(s, 0, 2), "tensor-sum-missing", tensor=2),
    c(
        "vectors summed twice",
        "gpt",
        F64,
        lambda s: {n: g * 4 if g.dim() == 1 else g for n, g in plain(s).items()},
        "tensor-sum-twice",
        tensor=4,
    ),
    c(
        "dropped, averaged twice",
        "mlp",
        F64,
        lambda s: weighted(s, 4, [0.25, 0.25, 0, 0.25]),
        "microbatches-missing scaled",
        microbatches=4,
    ),
    c(
        "dropped and tied",
        "gpt",
        F64,
        lambda s: weighted(s, 4, [1, 0, 1, 1]) | {"words.weight": None},
        "microbatches-missing frozen",
        microbatches=4,
    ),
    c(
        "tie lost, scaled",
        "gpt",
        F64,
        lambda s: {n: g * 0.5 for n, g in tied(s, 0, 1).items()},
        "tie-missing scaled",
        replicas=2,
    ),
    c("stale, frozen", "mlp", F64, lambda s: frozen(s, ["0."], plain(with_earlier(s))), "stale frozen", of=earlier),
    c(
        "by pieces, scaled",
        "cnn",
        F64,
        lambda s: statistics(s, 4, 0.25),
        "statistics-by-microbatch scaled",
        microbatches=4,
    ),
    c(
        "mean of means, frozen",
        "gpt",
        F32,
        lambda s: frozen(s, ["places"], weighted(s, 4, [1] * 4, counted=False)),
        "mean-of-means frozen",
        microbatches=4,
    ),
    c("shifted, decayed", "gpt", F64, lambda s: decayed(s, 0.05, shift(s, -1)), "labels-shifted decay-coupled"),
    c(
        "twice, swapped",
        "mlp",
        F64,
        lambda s: swapped(s, "1.", "2.", weighted(s, 4, [1, 2, 1, 1])),
        "microbatches-twice stages-swapped",
        microbatches=4,
    ),
    c(
        "dropped, clipped by stage",
        "mlp",
        F64,
        lambda s: by_stage(s, 0.05, [4], weighted(s, 4, [0, 1, 1, 1])),
        "microbatches-missing clipped-by-stage",
        clip=0.05,
        microbatches=4,
    ),
    c(
        "sums in bf16, scaled",
        "mlp",
        F32,
        lambda s: {n: g * 4 for n, g in summed_in(s, BF16, 4).items()},
        "low-precision scaled",
        microbatches=4,
    ),
]
