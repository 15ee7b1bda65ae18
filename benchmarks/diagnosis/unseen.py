"""Mistakes that real trainers make, by hand in plain PyTorch, written without a look at the tool to name them."""

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
from networks import IGNORED, Case, Setup, setup
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

F64, F32, BF16, F8 = torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2
Grads = dict[str, Tensor | None]
Part = tuple[Tensor, Tensor]
CASES: list[Case] = []
SCALED, LOST, TWICE, FROZEN = "scaled", "microbatches-missing", "microbatches-twice", "frozen"
STATISTICS, STAGEWISE, CROSSED = "statistics-by-microbatch", "clipped-by-stage", "own:targets-crossed"


def case(
    title: str, network: str, dtype: torch.dtype, truth: str | tuple[str, str], told: Any = None, **options: Any
) -> Callable[[Callable[[Setup], Grads]], Callable[[Setup], Grads]]:
    """Add a case; `told` is a function of the Setup where the options need one."""

    def register(gradients: Callable[[Setup], Grads]) -> Callable[[Setup], Grads]:
        names = truth if isinstance(truth, tuple) else (truth,)
        CASES.append(Case(title, network, dtype, gradients, names, told or options))
        return gradients

    return register


def split(s: Setup, parts: int, replicas: int = 1) -> list[list[Part]]:
    """For each replica, its micro-batches."""
    rows = zip(torch.tensor_split(s.inputs, replicas), torch.tensor_split(s.target, replicas), strict=True)
    return [list(zip(torch.tensor_split(x, parts), torch.tensor_split(y, parts), strict=True)) for x, y in rows]


def share(s: Setup, y: Tensor) -> float:
    """The part that some targets have in the mean over the batch."""
    return int((y != IGNORED).sum()) / int((s.target != IGNORED).sum())


def filled(s: Setup) -> float:
    """The part of the places that is no padding."""
    return int((s.target != IGNORED).sum()) / s.target.numel()


def taken(model: nn.Module) -> Grads:
    """The gradients that have come together, which are removed."""
    got = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return got


def step(s: Setup, parts: Iterable[Part], factor: float | None = None) -> Grads:
    """Add up the parts' gradients, each by its share of the batch, or by a fixed factor."""
    for x, y in parts:
        (s.loss(s.model(x), y) * (share(s, y) if factor is None else factor)).backward()
    return taken(s.model)


def whole(s: Setup) -> Grads:
    """The batch at once."""
    return step(s, [(s.inputs, s.target)])


def sliced(s: Setup, parts: int) -> list[Grads]:
    """Each part's own gradients, by its share, with batch norms over all rows."""
    output, got = s.model(s.inputs), []
    for out, y in zip(torch.tensor_split(output, parts), torch.tensor_split(s.target, parts), strict=True):
        (s.loss(out, y) * share(s, y)).backward(retain_graph=True)
        got.append(taken(s.model))
    return got


def plus(many: Iterable[Grads]) -> Grads:
    """The sum, name by name."""
    first, *rest = many
    total = dict(first)
    for one in rest:
        for name, g in one.items():
            total[name] = g if total[name] is None else total[name] if g is None else total[name] + g
    return total


def times(grads: Grads, factor: float, where: Callable[[str], bool] = lambda name: True) -> Grads:
    """Some of the gradients by a factor."""
    return {name: g * factor if g is not None and where(name) else g for name, g in grads.items()}


def norm(tensors: Iterable[Tensor | None]) -> float:
    """The norm of all of them together."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in tensors if g is not None))


def clipped(grads: Grads, bound: float, length: float | None = None) -> Grads:
    """As clip_grad_norm_, of a norm that may be given."""
    length = norm(grads.values()) if length is None else length
    return times(grads, min(1.0, bound / (length + 1e-6)))


def without(grads: Grads, *starts: str) -> Grads:
    """None for parameters whose names start so."""
    return {name: None if name.startswith(starts) else g for name, g in grads.items()}


def earlier(s: Setup, seed: int = 7) -> dict[str, Tensor]:
    """Weights of some steps ago: the present ones and noise of 2 %."""
    generator = torch.Generator().manual_seed(seed)
    old = {}
    for name, p in s.model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        old[name] = p.detach() + 0.02 * p.detach().square().mean().sqrt() * noise
    return old


def with_earlier(**options: Any) -> Callable[[Setup], dict[str, Any]]:
    """Options among which are the earlier weights."""
    return lambda s: {"earlier": earlier(s), **options}


def at(s: Setup, weights: dict[str, Tensor]) -> Grads:
    """The gradients of the batch at other weights."""
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    s.loss(functional_call(s.model, weights, (s.inputs,)), s.target).backward()
    return {name: weights[name].grad if name in weights else p.grad for name, p in s.model.named_parameters()}


def untie(s: Setup) -> None:
    """Give the last stage a copy of the embedding, as pipelines do."""
    s.model.head.weight = nn.Parameter(s.model.words.weight.detach().clone())


# accumulation
case("not divided by micro-batches", "mlp", F64, SCALED, microbatches=4)(lambda s: step(s, split(s, 4)[0], 1.0))
case("zero_grad within the loop", "mlp", F32, LOST, accumulation=8)(lambda s: step(s, split(s, 8)[0][-1:], 1 / 8))
case("next(iter(loader)): always the first micro-batch", "gpt", BF16, LOST, microbatches=4)(
    lambda s: step(s, split(s, 4)[0][:1] * 4, 1 / 4)
)
case("micro-batches lack their last row: x[i*m:(i+1)*m-1]", "mlp", F64, "own:rows-missing", microbatches=4)(
    lambda s: step(s, [(x[:-1], y[:-1]) for x, y in split(s, 4)[0]], 1 / 4)
)
case("mean of token means", "gpt", F64, "mean-of-means", microbatches=4)(lambda s: step(s, split(s, 4)[0], 1 / 4))
case("mean of 5 uneven means", "mlp", F64, "mean-of-means", accumulation=5)(lambda s: step(s, split(s, 5)[0], 1 / 5))
case("the step before was not zeroed, same batch", "mlp", F64, "own:not-zeroed", told=with_earlier(microbatches=2))(
    lambda s: plus([at(s, earlier(s)), step(setup("mlp", F64), split(s, 2)[0])])
)


@case("bf16 buffer for the sum of micro-batches", "mlp", F32, "low-precision", microbatches=8)
def _(s: Setup) -> Grads:
    main = {name: torch.zeros_like(p, dtype=BF16) for name, p in s.model.named_parameters()}
    for part in split(s, 8)[0]:
        for name, g in step(s, [part]).items():
            main[name] += g.to(BF16)
    return {name: g.float() for name, g in main.items()}


@case("the step before was not zeroed, another batch", "cnn", F32, "own:not-zeroed")
def _(s: Setup) -> Grads:
    other = setup("cnn", F32, 5)
    s.loss(s.model(other.inputs), other.target).backward()
    return whole(s)


# replicas
case("uneven replicas, 6 + 5 + 5 rows: the mean of their means", "mlp", F32, "mean-of-means", replicas=3)(
    lambda s: step(s, [part for (part,) in split(s, 1, 3)], 1 / 3)
)
case("all-reduce sums", "mlp", F64, SCALED, replicas=4)(lambda s: plus(step(s, parts, 1.0) for parts in split(s, 1, 4)))
case("replicas average the means of their own tokens", "gpt", F32, "mean-of-means", replicas=4)(
    lambda s: step(s, [part for (part,) in split(s, 1, 4)], 1 / 4)
)
case("no sampler: all replicas have the first one's rows", "mlp", F32, "replicas-missing", replicas=2)(
    lambda s: step(s, [split(s, 1, 2)[0][0]] * 2, 1 / 2)
)
case("gradients sent as 8-bit floats (e5m2)", "gpt", F32, "low-precision", replicas=2)(
    lambda s: plus({n: g.to(F8).float() for n, g in step(s, parts).items()} for parts in split(s, 1, 2))
)
case("a crashed replica sent zeros", "cnn", F64, "replicas-missing", replicas=4)(
    lambda s: plus(g for rank, g in enumerate(sliced(s, 4)) if rank != 1)
)


@case("running sum all-reduced for each micro-batch", "mlp", F32, TWICE, replicas=2, accumulation=3)
def _(s: Setup) -> Grads:
    ranks = split(s, 3, 2)
    sums = [times(whole(s), 0.0) for _ in ranks]
    for i in range(3):
        sums = [plus([total, step(s, [parts[i]])]) for total, parts in zip(sums, ranks, strict=True)]
        sums = [plus(sums)] * 2
    return sums[0]


@case("last two layers' bucket not waited for: rank 0's", "mlp", F64, "replicas-missing", replicas=4, accumulation=2)
def _(s: Setup) -> Grads:
    local = times(step(s, split(s, 2, 4)[0]), 4)
    return {name: local[name] if name[0] in "34" else g for name, g in whole(s).items()}


@case("ZeRO: each rank keeps its part of its own gradient, unreduced", "mlp", F64, "replicas-missing", replicas=4)
def _(s: Setup) -> Grads:
    ranks = [step(s, parts, 1.0) for parts in split(s, 1, 4)]
    flat = [torch.tensor_split(torch.cat([g.flatten() for g in rank.values()]), 4) for rank in ranks]
    kept = torch.cat([flat[rank][rank] for rank in range(4)])
    sizes = [g.numel() for g in ranks[0].values()]
    return {n: g.view_as(ranks[0][n]) for n, g in zip(ranks[0], kept.split(sizes), strict=True)}


@case("replica 2 of 3 began from other weights: nobody broadcast them", "mlp", F32, "own:other-weights", replicas=3)
def _(s: Setup) -> Grads:
    ranks = split(s, 1, 3)
    right = [step(s, ranks[0]), step(s, ranks[1])]
    s.model.load_state_dict(setup("mlp", F32, 11).model.state_dict())
    return plus([*right, step(s, ranks[2])])


# clipping, loss scale
case("each replica clips before the all-reduce", "mlp", F64, "clipped-before-averaging", replicas=4, clip=0.25)(
    lambda s: times(plus(clipped(step(s, parts, 1.0), 0.25) for parts in split(s, 1, 4)), 1 / 4)
)
case("each parameter is clipped by its own norm", "gpt", F64, "clipped-by-parameter", clip=0.1)(
    lambda s: {name: clipped({name: g}, 0.1)[name] for name, g in whole(s).items()}
)
case("each stage clips by its own norm", "mlp", F32, STAGEWISE, stages=3, cut=["1", "3"], clip=0.15)(
    lambda s: staged(whole(s), 0.15, ("0.",), ("1.", "2."))
)
case("clips by value", "cnn", F32, "own:clipped-by-value", clip=0.05)(
    lambda s: {name: g.clamp(-0.05, 0.05) for name, g in whole(s).items()}
)
case("the trainer never clips, although told to", "gpt", F32, "not-clipped", clip=0.2, microbatches=2)(
    lambda s: step(s, split(s, 2)[0])
)
case("clips the scaled gradients, then unscales", "mlp", F32, SCALED, loss_scale=512.0, clip=0.2)(
    lambda s: times(clipped(times(whole(s), 512.0), 0.2), 1 / 512)
)
case("the group without weight decay (vectors) is not unscaled", "mlp", F64, SCALED, loss_scale=128.0)(
    lambda s: {name: g * 128 if g.ndim == 1 else g for name, g in whole(s).items()}
)
case("loss scale is never taken away", "cnn", BF16, SCALED, loss_scale=1024.0)(lambda s: times(whole(s), 1024.0))
case("unscaled twice", "gpt", F32, SCALED, loss_scale=64.0, accumulation=2)(
    lambda s: times(step(s, split(s, 2)[0]), 1 / 64)
)
case("fp16 gradients overflow and the step is not skipped", "mlp", F32, "own:overflow", loss_scale=2.0**20)(
    lambda s: {name: (g * 2.0**20).to(torch.float16).float() / 2.0**20 for name, g in whole(s).items()}
)


@case("clip_grad_norm_ within the accumulation loop", "mlp", F32, "clipped-before-averaging", accumulation=4, clip=0.1)
def _(s: Setup) -> Grads:
    for x, y in split(s, 4)[0]:
        (s.loss(s.model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    return taken(s.model)


def staged(grads: Grads, bound: float, *stages: tuple[str, ...]) -> Grads:
    """Clip each stage, given by how its names start (the rest is the last one), by its own norm."""
    clean, rest = {}, grads
    for starts in (*stages, ("",)):
        clean |= clipped({name: g for name, g in rest.items() if name.startswith(starts)}, bound)
        rest = {name: g for name, g in rest.items() if name not in clean}
    return clean


@case("clip_grad_norm_ on FSDP shards: by a rank's norm", "mlp", F64, "clipped-by-shard", replicas=4, clip=0.2)
def _(s: Setup) -> Grads:
    ranks: list[Grads] = [{}, {}, {}, {}]
    for name, g in whole(s).items():
        for rank, shard in zip(ranks, torch.tensor_split(g, 4), strict=True):
            rank[name] = shard
    ranks = [clipped(rank, 0.2) for rank in ranks]
    return {name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}


@case("the tied weight is in the norm twice, once for each stage", "gpt", F64, SCALED, stages=2, clip=0.3)
def _(s: Setup) -> Grads:
    got = whole(s)
    return clipped(got, 0.3, norm([*got.values(), got["words.weight"]]))


# pipelines
case("earlier weights", "mlp", F64, "stale", told=with_earlier(stages=4, microbatches=4))(lambda s: at(s, earlier(s)))
case("gradients come back last in, first out", "mlp", F64, "own:crossed-returns", stages=2, cut=["3"], microbatches=4)(
    lambda s: returned(s, 3, [3, 2, 1, 0])
)
case("last stage takes the targets in reverse order", "mlp", F32, CROSSED, stages=2, microbatches=4)(
    lambda s: crossed(s)
)
case("tied weight: first and last stage average", "gpt", BF16, SCALED, stages=2, cut=["blocks.1"])(
    lambda s: times(whole(s), 0.5, lambda name: name == "words.weight")
)
case("tied weight: only the last stage's gradient", "gpt", F32, "tie-missing", stages=2)(
    lambda s: last_only(s, split(s, 1)[0])
)


@case("earlier weights in the first stage of two", "gpt", F64, "stale", told=with_earlier(stages=2, cut=["blocks.2"]))
def _(s: Setup) -> Grads:
    untie(s)
    old = {n: w for n, w in earlier(s).items() if n.startswith(("words", "places", "blocks.0", "blocks.1"))}
    got = at(s, old)
    got["words.weight"] = got["words.weight"] + got.pop("head.weight")
    return got


def unstashed(model: nn.Sequential, x: Tensor, old: dict[str, Tensor], stage: range) -> Tensor:
    """Forward with old weights, backward through the present ones, in a stage's layers."""
    for i, layer in enumerate(model):
        linear = layer if isinstance(layer, nn.Linear) else layer[0]
        name = str(i) if linear is layer else f"{i}.0"
        now = linear(x)
        if i in stage:
            then = functional.linear(x, old[f"{name}.weight"], old[f"{name}.bias"])
            now = now + (then - now).detach()
        x = now if linear is layer else now.tanh()
    return x


@case("no weight stashing: backward through newer ones", "mlp", F32, "stale", told=with_earlier(stages=2))
def _(s: Setup) -> Grads:
    s.loss(unstashed(s.model, s.inputs, earlier(s), range(3)), s.target).backward()
    return taken(s.model)


@case("what a stage receives is detached: zeros in the first stage", "mlp", F32, FROZEN, stages=2, microbatches=2)
def _(s: Setup) -> Grads:
    for x, y in split(s, 2)[0]:
        (s.loss(s.model[2:](s.model[:2](x).detach()), y) / 2).backward()
    return {n: torch.zeros_like(s.model.get_parameter(n)) if g is None else g for n, g in taken(s.model).items()}


def returned(s: Setup, cut: int, order: list[int]) -> Grads:
    """Two stages; the first one's backward of i gets what was meant for order[i]."""
    parts, sent, back = split(s, len(order))[0], [], []
    for x, y in parts:
        sent.append(s.model[:cut](x))
        received = sent[-1].detach().requires_grad_()
        (s.loss(s.model[cut:](received), y) * share(s, y)).backward()
        back.append(received.grad)
    for out, i in zip(sent, order, strict=True):
        out.backward(back[i])
    return taken(s.model)


def crossed(s: Setup) -> Grads:
    """Four micro-batches, the targets in reverse order."""
    parts = split(s, 4)[0]
    return step(s, [(x, y) for (x, _), (_, y) in zip(parts, reversed(parts), strict=True)])


@case("receive buffer overwritten early", "mlp", F64, "own:buffer-overwritten", stages=2, cut=["2"], microbatches=4)
def _(s: Setup) -> Grads:
    parts, linear = split(s, 4)[0], s.model[2][0]
    sent = [s.model[:2](x) for x, _ in parts]
    for i, (_, y) in enumerate(parts):
        wrong = functional.linear(sent[min(i + 1, 3)].detach(), linear.weight)
        z = functional.linear(sent[i], linear.weight.detach(), linear.bias) + wrong - wrong.detach()
        (s.loss(s.model[3:](z.tanh()), y) / 4).backward()
    return taken(s.model)


@case("1F1B ends early in the first stage", "mlp", F64, LOST, stages=4, cut=["1", "2", "3"], microbatches=6)
def _(s: Setup) -> Grads:
    got = [step(s, [part]) for part in split(s, 6)[0]]
    early = plus(got[:-1])
    return {name: early[name] if name[0] == "0" else g for name, g in plus(got).items()}


@case("stages send activations and gradients in bf16", "gpt", F32, "low-precision", stages=4, microbatches=2)
def _(s: Setup) -> Grads:
    for block in s.model.blocks[:3]:
        block.register_forward_hook(lambda module, inputs, output: output.to(BF16).float())
    return step(s, split(s, 2)[0])


@case("interleaved stages: chunks 1 and 2 swap names", "gpt", F32, "stages-swapped", stages=2, microbatches=4)
def _(s: Setup) -> Grads:
    got, swap = step(s, split(s, 4)[0]), {"blocks.1": "blocks.2", "blocks.2": "blocks.1"}
    return {name: got[swap.get(name[:8], name[:8]) + name[8:]] for name in got}


@case("skip connection over the cut: its gradient is not sent back", "cnn", F64, "own:skip-gradient-missing", stages=2)
def _(s: Setup) -> Grads:
    block = s.model[4]

    def forward(x: Tensor) -> Tensor:
        inner = functional.relu(block.norm1(block.conv1(x)))
        return functional.relu(x.detach() + block.norm2(block.conv2(inner)))

    block.forward = forward
    return whole(s)


def last_only(s: Setup, parts: list[Part], factor: float | None = None) -> Grads:
    """Gradients without what the first stage has for the tied weight."""
    untie(s)
    got = step(s, parts, factor)
    return got | {"words.weight": got.pop("head.weight")}


@case("tied weight: only the first stage's gradient", "gpt", F64, "tie-missing", stages=4, microbatches=2)
def _(s: Setup) -> Grads:
    untie(s)
    got = step(s, split(s, 2)[0])
    del got["head.weight"]
    return got


# tensor parallelism
case("column-parallel layers do not all-reduce their input's gradient", "gpt", F64, "tensor-sum-missing", tensor=2)(
    lambda s: unreduced(s, 2, "0123")
)
case("norms are on all ranks alike, and summed over them", "gpt", BF16, "tensor-sum-twice", tensor=2, microbatches=2)(
    lambda s: times(step(s, split(s, 2)[0]), 2, lambda name: "norm" in name)
)
case("context parallel: each rank counts places from 0", "gpt", F32, "own:places-restart")(lambda s: restarted(s))


def owned(s: Setup, ranks: int, rank: int) -> dict[str, Tensor]:
    """Which output features of the column-parallel layers are a rank's: the heads' and a part of the MLP's."""
    mine = {}
    for i, block in enumerate(s.model.blocks):
        for name in ("qkv", "up"):
            size = getattr(block, name).out_features
            groups = torch.arange(size).view(3 if name == "qkv" else 1, ranks, -1)
            mine[f"blocks.{i}.{name}"] = torch.zeros(size, dtype=torch.bool).index_fill(0, groups[:, rank].flatten(), 1)
    return mine


def unreduced(s: Setup, ranks: int, blocks: str) -> Grads:
    """Column-parallel layers of some blocks do not all-reduce the gradient of their input."""
    got = []
    for rank in range(ranks):
        mine = owned(s, ranks, rank)
        for name, mask in mine.items():
            if name[7] in blocks:
                layer = s.model.get_submodule(name)
                layer.forward = lambda x, a=layer, m=mask: torch.where(
                    m, functional.linear(x, a.weight, a.bias), functional.linear(x.detach(), a.weight, a.bias)
                )
        got.append(whole(s))
    total = dict(got[0])
    for rank in range(1, ranks):
        for name, mask in owned(s, ranks, rank).items():
            for kind in (".weight", ".bias"):
                total[name + kind] = total[name + kind].clone()
                total[name + kind][mask] = got[rank][name + kind][mask]
        for name in total:
            if name.endswith(("proj.weight", "down.weight")):
                columns = torch.tensor_split(total[name], ranks, 1)
                own = torch.tensor_split(got[rank][name], ranks, 1)[rank]
                total[name] = torch.cat([own if r == rank else c for r, c in enumerate(columns)], 1)
    return total


@case("the bias of row-parallel layers is added by each rank", "gpt", F32, "own:bias-per-rank", tensor=4)
def _(s: Setup) -> Grads:
    for block in s.model.blocks:
        for layer in (block.proj, block.down):
            layer.register_forward_hook(lambda layer, inputs, output: output + 3 * layer.bias)
    return whole(s)


def local_norms(s: Setup, tokens: int) -> None:
    """Let norms have gradients of the first tokens only, those of one rank."""
    for layer in s.model.modules():
        if isinstance(layer, nn.LayerNorm):

            def forward(x: Tensor, layer: nn.LayerNorm = layer) -> Tensor:
                here = (torch.arange(x.shape[1]) < tokens)[:, None]
                weight, bias = (torch.where(here, p, p.detach()) for p in (layer.weight, layer.bias))
                return functional.layer_norm(x, x.shape[-1:]) * weight + bias

            layer.forward = forward


@case("sequence parallel: norms' gradients are not all-reduced", "gpt", F64, "tensor-sum-missing", tensor=2)
def _(s: Setup) -> Grads:
    local_norms(s, 6)
    return whole(s)


@case("shards of qkv joined as q0 k0 v0 q1 k1 v1", "gpt", F32, "own:shards-permuted", tensor=2)
def _(s: Setup) -> Grads:
    return {
        name: torch.cat([g.view(3, 2, -1, *g.shape[1:])[:, r].flatten(0, 1) for r in range(2)]) if "qkv" in name else g
        for name, g in whole(s).items()
    }


@case("backward of the row-parallel all-reduce sums over ranks again", "gpt", F32, "tensor-sum-twice", tensor=2)
def _(s: Setup) -> Grads:
    for block in s.model.blocks:
        block.down.register_forward_hook(lambda layer, inputs, output: 2 * output - output.detach())
    return times(whole(s), 0.5, lambda name: name.endswith("down.bias"))


def restarted(s: Setup) -> Grads:
    """Gradients where each half of the tokens is placed from 0, as two context-parallel ranks did."""
    model, half = s.model, s.inputs.shape[1] // 2
    x = model.words(s.inputs) + model.places.weight[:half].repeat(2, 1)
    for block in model.blocks:
        x = block(x)
    s.loss(model.head(model.norm(x)), s.target).backward()
    return taken(model)


# loss and data
case("the mean is over padding, too: loss * mask / mask.numel()", "gpt", F32, "padding-counted", microbatches=4)(
    lambda s: times(step(s, split(s, 4)[0]), filled(s))
)
case("padding is learnt as word 0", "gpt", F64, "padding-counted")(
    lambda s: step(s, [(s.inputs, s.target.masked_fill(s.target == IGNORED, 0))], 1.0)
)
case("labels are shifted by the data and again by the model", "gpt", F32, "labels-shifted")(
    lambda s: step(s, [(s.inputs, shifted(s.target))], 1.0)
)
case("labels are not shifted at all", "gpt", F64, "labels-shifted", microbatches=2)(
    lambda s: step(s, split(s._replace(target=torch.where(s.target == IGNORED, IGNORED, s.inputs)), 2)[0])
)
case("label smoothing of 0.1 left on", "cnn", F64, "own:label-smoothing")(
    lambda s: whole(s._replace(loss=partial(functional.cross_entropy, label_smoothing=0.1)))
)
case("the loss is a sum over rows", "mlp", BF16, SCALED, microbatches=2)(lambda s: step(s, split(s, 2)[0], 8.0))


def shifted(y: Tensor) -> Tensor:
    """Targets shifted once more."""
    return torch.cat([y[:, 1:], torch.full_like(y[:, :1], IGNORED)], 1)


@case("attention is not causal", "gpt", BF16, "own:not-causal")
def _(s: Setup) -> Grads:
    real = functional.scaled_dot_product_attention
    with mock.patch.object(functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: real(q, k, v)):
        return whole(s)


# batch norm, checkpoints, parameters
case("batch norms by micro-batch", "cnn", F64, STATISTICS, microbatches=4)(lambda s: step(s, split(s, 4)[0]))
case("batch norms by replica", "cnn", F32, STATISTICS, replicas=2)(
    lambda s: plus(step(s, parts) for parts in split(s, 1, 2))
)
case("model.eval() after validation, no train()", "cnn", F32, "evaluation-mode")(
    lambda s: whole(s._replace(model=s.model.eval()))
)
case("reentrant checkpoint of an input without requires_grad", "cnn", F32, FROZEN)(lambda s: checkpointed(s))
case("a checkpointed block adds its gradients twice", "cnn", BF16, SCALED)(
    lambda s: times(whole(s), 2, lambda name: name.startswith("4."))
)
case("third layer left frozen", "mlp", F64, FROZEN)(lambda s: without(whole(s), "2."))
case("L2 penalty of 0.1 is in the saved gradients", "cnn", F32, "decay-coupled")(
    lambda s: {name: g + 0.1 * s.model.get_parameter(name).detach() for name, g in whole(s).items()}
)
case("square weight saved transposed", "mlp", F32, "own:transposed", replicas=2)(
    lambda s: {name: g.T.contiguous() if name == "2.0.weight" else g for name, g in whole(s).items()}
)


@case("hand-written batch norm takes its statistics for constants", "cnn", F64, "own:statistics-constant")
def _(s: Setup) -> Grads:
    for layer in s.model.modules():
        if isinstance(layer, nn.BatchNorm2d):

            def forward(x: Tensor, layer: nn.BatchNorm2d = layer) -> Tensor:
                still = x.detach()
                mean, var = still.mean((0, 2, 3)), still.var((0, 2, 3), unbiased=False)
                return functional.batch_norm(x, mean, var, layer.weight, layer.bias)

            layer.forward = forward
    return whole(s)


def checkpointed(s: Setup) -> Grads:
    """Gradients where the first layers are a reentrant checkpoint of an input without gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        s.loss(s.model[3:](checkpoint(s.model[:3], s.inputs, use_reentrant=True)), s.target).backward()
    return taken(s.model)


# pairs
case("not divided; first layer frozen", "mlp", F64, (SCALED, FROZEN), microbatches=4)(
    lambda s: without(step(s, split(s, 4)[0], 1.0), "0.")
)
case("replicas summed; last micro-batches dropped", "mlp", F32, (SCALED, LOST), replicas=3, accumulation=2)(
    lambda s: times(plus(step(s, parts[:-1]) for parts in split(s, 2, 3)), 3)
)
case("padding learnt as word 0; loss scale not taken away", "gpt", F32, ("padding-counted", SCALED), loss_scale=256.0)(
    lambda s: step(s, [(s.inputs, s.target.masked_fill(s.target == IGNORED, 0))], 256.0)
)
case("shifted twice; stages clip", "gpt", F64, ("labels-shifted", STAGEWISE), stages=2, cut=["blocks.2"], clip=0.2)(
    lambda s: staged(step(s, [(s.inputs, shifted(s.target))], 1.0), 0.2, ("words", "places", "blocks.0", "blocks.1"))
)
case("batch norms by micro-batch; not divided", "cnn", F32, (STATISTICS, SCALED), microbatches=2)(
    lambda s: step(s, split(s, 2)[0], 1.0)
)
case("eval(); stem frozen", "cnn", F64, ("evaluation-mode", FROZEN))(
    lambda s: without(whole(s._replace(model=s.model.eval())), "0.", "1.")
)
case("batch norms by replica; all-reduce sums", "cnn", BF16, (STATISTICS, SCALED), replicas=4)(
    lambda s: plus(step(s, parts, 1.0) for parts in split(s, 1, 4))
)
case("last in, first out; bias frozen", "mlp", F64, ("own:crossed-returns", FROZEN), stages=2, microbatches=4)(
    lambda s: without(returned(s, 2, [3, 2, 1, 0]), "4.bias")
)
case("partial input gradients; norms summed", "gpt", F32, ("tensor-sum-missing", "tensor-sum-twice"), tensor=2)(
    lambda s: times(unreduced(s, 2, "3"), 2, lambda name: "norm" in name)
)
case("only the last micro-batch; loss scale stays", "mlp", BF16, (LOST, SCALED), accumulation=4, loss_scale=128.0)(
    lambda s: step(s, split(s, 4)[0][-1:], 128 / 4)
)
case("stale; not divided", "mlp", F32, ("stale", SCALED), told=with_earlier(stages=3, microbatches=4))(
    lambda s: times(at(s, earlier(s)), 4)
)
case(
    "targets reversed; clips scaled", "mlp", F64, (CROSSED, SCALED), stages=2, microbatches=4, loss_scale=64.0, clip=0.3
)(lambda s: times(clipped(times(crossed(s), 64.0), 0.3), 1 / 64))
case("reentrant checkpoint without gradients; replicas summed", "cnn", F32, (FROZEN, SCALED), replicas=2)(
    lambda s: times(checkpointed(s), 2)
)
case("places from 0; clips by value", "gpt", F32, ("own:places-restart", "own:clipped-by-value"), clip=0.02)(
    lambda s: {name: g.clamp(-0.02, 0.02) for name, g in restarted(s).items()}
)
case("a micro-batch read twice; a layer adds twice", "mlp", F64, (TWICE, SCALED), microbatches=8)(
    lambda s: times(step(s, [split(s, 8)[0][i] for i in (0, 1, 2, 3, 4, 4, 6, 7)]), 2, lambda name: name[0] == "1")
)
case("divided by world size once more; places frozen", "gpt", F64, (SCALED, FROZEN), replicas=4, accumulation=2)(
    lambda s: without(times(plus(step(s, parts) for parts in split(s, 2, 4)), 1 / 4), "places")
)
case(
    "batch norms split; stages clip", "cnn", F64, (STATISTICS, STAGEWISE), microbatches=4, stages=2, cut=["4"], clip=0.3
)(lambda s: staged(step(s, split(s, 4)[0]), 0.3, ("0.", "1.", "3.")))
case("third micro-batch lost; biases not unscaled", "mlp", F32, (LOST, SCALED), microbatches=6, loss_scale=32.0)(
    lambda s: {n: g * (32 if "bias" in n else 1) for n, g in step(s, split(s, 6)[0][:2] + split(s, 6)[0][3:]).items()}
)
case("batch norms by replica; a block adds twice", "cnn", F64, (STATISTICS, SCALED), replicas=2)(
    lambda s: times(plus(step(s, parts) for parts in split(s, 1, 2)), 2, lambda name: name.startswith("3."))
)
case("replicas summed; third layer frozen", "mlp", BF16, (SCALED, FROZEN), replicas=2)(
    lambda s: without(plus(step(s, parts, 1.0) for parts in split(s, 1, 2)), "2.")
)
case("tied weight averaged; biases not unscaled", "gpt", F64, (SCALED, SCALED), stages=2, loss_scale=16.0)(
    lambda s: times(times(whole(s), 0.5, lambda name: name == "words.weight"), 16.0, lambda name: "bias" in name)
)
case("labels shifted twice; first micro-batch only", "gpt", F32, ("labels-shifted", LOST), microbatches=4)(
    lambda s: step(s, [(x, shifted(y)) for x, y in split(s, 4)[0][:1]], 1 / 4)
)
case("mean of uneven micro-batches' means; last bias frozen", "mlp", F64, ("mean-of-means", FROZEN), microbatches=7)(
    lambda s: without(step(s, split(s, 7)[0], 1 / 7), "4.bias")
)
case("batch norms split; clips by value", "cnn", F32, (STATISTICS, "own:clipped-by-value"), microbatches=8, clip=0.1)(
    lambda s: {name: g.clamp(-0.1, 0.1) for name, g in step(s, split(s, 8)[0]).items()}
)
case("mean over padding, too; norms summed over ranks", "gpt", BF16, ("padding-counted", "tensor-sum-twice"), tensor=2)(
    lambda s: times(times(whole(s), filled(s)), 2, lambda name: "norm" in name)
)
case("stale weights; first layer frozen", "mlp", F32, ("stale", FROZEN), told=with_earlier(stages=2))(
    lambda s: without(at(s, earlier(s)), "0.")
)
case("mean of token means; last tie only", "gpt", F64, ("mean-of-means", "tie-missing"), stages=2, microbatches=4)(
    lambda s: last_only(s, split(s, 4)[0], 1 / 4)
)


@case("mean of token means; last block not reduced", "gpt", F32, ("mean-of-means", "replicas-missing"), replicas=2)
def _(s: Setup) -> Grads:
    ranks = [step(s, parts, 1.0) for parts in split(s, 1, 2)]
    mean = times(plus(ranks), 1 / 2)
    return {name: ranks[0][name] if name.startswith("blocks.3") else g for name, g in mean.items()}


@case("tied weight averaged; one rank's norms", "gpt", F64, (SCALED, "tensor-sum-missing"), stages=2, tensor=2)
def _(s: Setup) -> Grads:
    local_norms(s, 6)
    return times(whole(s), 0.5, lambda name: name == "words.weight")


@case("detached; padding divides", "gpt", BF16, (FROZEN, "padding-counted"), stages=2, cut=["blocks.2"], microbatches=2)
def _(s: Setup) -> Grads:
    s.model.blocks[1].register_forward_hook(lambda module, inputs, output: output.detach())
    return times(last_only(s, split(s, 2)[0]), filled(s))
