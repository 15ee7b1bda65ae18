"""Fifty mistakes that real trainers make, written by hand in plain PyTorch. Nothing here uses Stretto."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from networks import IGNORED, TOKENS, Case, Setup
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
Gradients = dict[str, Tensor | None]
Options = dict[str, Any] | Callable[[Setup], dict[str, Any]]

CASES: list[Case] = []


def case(title: str, network: str, dtype: torch.dtype, options: Options, *truth: str) -> Callable[..., Any]:
    """Put the function below into CASES."""

    def keep(function: Callable[[Setup], Gradients]) -> Callable[[Setup], Gradients]:
        CASES.append(Case(title, network, dtype, function, truth, options))
        return function

    return keep


# One empty line between functions from here on.
# fmt: off

# ---------------------------------------------------------------- what right trainers do


def gradient(s: Setup, value: Tensor) -> dict[str, Tensor]:
    """The gradient of a value with respect to each parameter, zeros where it has none."""
    names = dict(s.model.named_parameters())
    found = torch.autograd.grad(value, list(names.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(names.items(), found, strict=True)}

def collected(s: Setup) -> Gradients:
    """What lies in .grad now."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in s.model.named_parameters()}

def total(many: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Their sum, one after another in their own precision."""
    result: dict[str, Tensor] = {}
    for one in many:
        result = {n: result[n] + g if n in result else g.clone() for n, g in one.items()}
    return result

def times(gradients: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """All of them by a number."""
    return {n: g * factor for n, g in gradients.items()}

def norm(gradients: dict[str, Tensor]) -> float:
    """The global norm."""
    return sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5

def clipped(gradients: dict[str, Tensor], bound: float, length: float | None = None) -> dict[str, Tensor]:
    """As clip_grad_norm_ does, given another norm if wished."""
    return times(gradients, min(1.0, bound / ((norm(gradients) if length is None else length) + 1e-6)))

def pieces(s: Setup, *counts: int) -> list[Any]:
    """Row numbers of each piece, nested: replicas first, then micro-batches."""

    def cut(rows: Tensor, left: tuple[int, ...]) -> Any:
        return [cut(part, left[1:]) for part in rows.tensor_split(left[0])] if left else rows

    return cut(torch.arange(len(s.target)), counts)

def weight(s: Setup, rows: Tensor) -> float:
    """The part of the batch's examples (or real tokens) that these rows have."""
    return float((s.target[rows] != IGNORED).sum()) / float((s.target != IGNORED).sum())

def mean(s: Setup, rows: Tensor) -> dict[str, Tensor]:
    """The gradient of the mean loss of some rows alone."""
    return gradient(s, s.loss(s.model(s.inputs[rows]), s.target[rows]))

def share(s: Setup, rows: Tensor) -> dict[str, Tensor]:
    """What these rows put into the gradient of the whole batch."""
    return gradient(s, s.loss(s.model(s.inputs[rows]), s.target[rows]) * weight(s, rows))

def whole(s: Setup) -> dict[str, Tensor]:
    """The gradient of the whole batch with the model as it stands."""
    return gradient(s, s.loss(s.model(s.inputs), s.target))

def units(s: Setup) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    """The model as a chain of functions, by the name of each one's first module."""
    m = s.model
    if isinstance(m, nn.Sequential):
        return list(m.named_children())
    chain = [("words", lambda tokens: m.words(tokens) + m.places.weight[: tokens.shape[1]])]
    chain += [(f"blocks.{i}", block) for i, block in enumerate(m.blocks)]
    return [*chain, ("norm", lambda x: m.head(m.norm(x)))]

def stages_of(s: Setup, starts: list[str]) -> list[Callable[[Tensor], Tensor]]:
    """One function for each stage; `starts` names the first module of each but the first."""
    groups: list[list[Callable[[Tensor], Tensor]]] = [[]]
    for name, function in units(s):
        if name in starts:
            groups.append([])
        groups[-1].append(function)

    def runner(group: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for function in group:
                x = function(x)
            return x

        return run

    return [runner(group) for group in groups]

def received(x: Tensor) -> Tensor:
    """A tensor that came from the stage before."""
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() else x

def pipeline(
    s: Setup,
    starts: list[str],
    count: int,
    send: Callable[[int, int, Tensor], Tensor] = lambda stage, micro, x: x,
    back: Callable[[int, int, Tensor], Tensor] = lambda stage, micro, g: g,
    label: Callable[[int], int] = lambda micro: micro,
) -> Gradients:
    """Forward of all micro-batches, then backward of each, stage by stage."""
    chain, rows = stages_of(s, starts), pieces(s, count)
    saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for micro, some in enumerate(rows):
        x = s.inputs[some]
        for stage, run in enumerate(chain):
            x = received(send(stage, micro, x) if stage else x)
            saved[stage, micro] = x, run(x)
            x = saved[stage, micro][1]
    for micro, some in enumerate(rows):
        x, y = saved[len(chain) - 1, micro]
        (s.loss(y, s.target[rows[label(micro)]]) * weight(s, some)).backward()
        for stage in reversed(range(len(chain) - 1)):
            sent = back(stage, micro, x.grad)
            x, y = saved[stage, micro]
            y.backward(sent)
    return collected(s)

def earlier(s: Setup, seed: int, part: float = 0.02) -> dict[str, Tensor]:
    """Weights of some steps ago: the present ones and noise."""
    g = torch.Generator().manual_seed(seed)
    result = {}
    for name, p in s.model.named_parameters():
        noise = torch.randn(p.shape, generator=g, dtype=F64) * part * float(p.detach().abs().mean())
        result[name] = p.detach() + noise.to(p.dtype)
    return result

def gradient_at(s: Setup, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the whole batch at other weights; those not given are the present ones."""
    present = {n: weights.get(n, p).detach().clone().requires_grad_() for n, p in s.model.named_parameters()}
    value = s.loss(functional_call(s.model, present, (s.inputs,)), s.target)
    return dict(zip(present, torch.autograd.grad(value, list(present.values())), strict=True))

class Times(torch.autograd.Function):
    """The same forward; gradients by a number backward, as of an all-reduce of equal tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """The tensor itself."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """The gradient, by the number."""
        return g * ctx.factor, None

def decoder(
    block: nn.Module,
    x: Tensor,
    size: int = 1,
    reduce: Callable[[Tensor], Tensor] = lambda y: y,
    normed: Callable[[nn.Module, Tensor], Tensor] = lambda module, x: module(x),
    causal: bool = True,
) -> Tensor:
    """A block of the language model as its tensor-parallel ranks compute it."""
    rows, tokens, width = x.shape
    h, y = normed(block.norm1, x), torch.zeros((), dtype=x.dtype)
    for heads in torch.arange(block.heads).tensor_split(size):
        w = block.qkv.weight.view(3, block.heads, -1, width)[:, heads].reshape(-1, width)
        b = block.qkv.bias.view(3, block.heads, -1)[:, heads].reshape(-1)
        q, k, v = functional.linear(h, w, b).view(rows, tokens, 3, len(heads), -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        columns = block.proj.weight.view(width, block.heads, -1)[:, heads].reshape(width, -1)
        y = y + seen.transpose(1, 2).reshape(rows, tokens, -1) @ columns.T
    x = x + reduce(y) + block.proj.bias
    h, y = normed(block.norm2, x), torch.zeros((), dtype=x.dtype)
    for mine in torch.arange(4 * width).tensor_split(size):
        inner = functional.gelu(functional.linear(h, block.up.weight[mine], block.up.bias[mine]))
        y = y + inner @ block.down.weight[:, mine].T
    return x + reduce(y) + block.down.bias

def by_batch(x: Tensor, bn: nn.Module, detach: bool = False) -> Tensor:
    """Batch norm by its formula; with `detach`, the statistics are taken for constants."""
    centre = x.mean((0, 2, 3), keepdim=True)
    spread = x.var((0, 2, 3), keepdim=True, unbiased=False)
    if detach:
        centre, spread = centre.detach(), spread.detach()
    return (x - centre) / (spread + bn.eps).sqrt() * bn.weight[:, None, None] + bn.bias[:, None, None]

def norms_of(model: nn.Module) -> list[nn.BatchNorm2d]:
    """The batch norms."""
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]

# ---------------------------------------------------------------- mlp, one mistake

@case("Uneven micro-batches (4, 3, 3, 3, 3) averaged as if they were equal",
      "mlp", F32, {"microbatches": 5}, "mean-of-means")
def uneven_average(s: Setup) -> Gradients:
    """loss / 5 for each."""
    return times(total(mean(s, rows) for rows in pieces(s, 5)), 1 / 5)

@case("Gradient buffer of stage 1 lags: from the second on, each micro-batch gets the one before it",
      "mlp", F64, {"microbatches": 8, "stages": 4, "cut": ["1", "2", "4"]}, "own:microbatches-crossed")
def late_gradient(s: Setup) -> Gradients:
    """The copy into the second half of a double buffer was not waited for."""
    kept: dict[int, Tensor] = {}

    def back(stage: int, micro: int, g: Tensor) -> Tensor:
        if stage != 1:
            return g
        kept[micro] = g.clone()
        return kept[max(micro - 1, 0)]

    return pipeline(s, ["1", "2", "4"], 8, back=back)

@case("Middle stage recomputes its activations from a buffer that the last micro-batch overwrote",
      "mlp", F32, {"microbatches": 4, "stages": 3}, "own:activations-overwritten")
def overwritten_input(s: Setup) -> Gradients:
    """Each stage keeps its input for the recomputation; the middle has one buffer only."""
    first, middle, last = stages_of(s, ["2", "3"])
    rows, buffer, saved = pieces(s, 4), torch.empty(0), []
    for some in rows:
        start = first(s.inputs[some])
        buffer = received(start)
        with torch.no_grad():
            end = middle(buffer)
        saved.append((start, received(end)))
    for some, (start, end) in zip(rows, saved, strict=True):
        (s.loss(last(end), s.target[some]) / 4).backward()
        buffer.grad = None
        middle(buffer).backward(end.grad)
        start.backward(buffer.grad)
    return collected(s)

def mlp_ranks(s: Setup, size: int, own: int | None = None, extra: float = 0.0) -> Tensor:
    """Layers 0, 2 by columns, 1, 3 by rows. `own`: layer 2's input gets its gradient from this rank only."""
    x = s.inputs
    for column, row in ((0, 1), (2, 3)):
        a, b = s.model[column][0], s.model[row][0]
        y = torch.zeros((), dtype=x.dtype)
        for rank, mine in enumerate(torch.arange(24).tensor_split(size)):
            seen = x.detach() if column == 2 and own is not None and rank != own else x
            y = y + torch.tanh(functional.linear(seen, a.weight[mine], a.bias[mine])) @ b.weight[:, mine].T
        x = torch.tanh(y + b.bias + extra * b.bias.detach())
    return s.model[4](x)

def unreduced_input(s: Setup, size: int) -> dict[str, Tensor]:
    """Each rank goes on backward with its own part of the gradient of layer 2's input."""
    ranks = [gradient(s, s.loss(mlp_ranks(s, size, own=rank), s.target)) for rank in range(size)]
    result = ranks[0]
    for name, axis in (("0.0.weight", 0), ("0.0.bias", 0), ("1.0.weight", 1)):
        parts = [g[name].tensor_split(size, axis)[rank] for rank, g in enumerate(ranks)]
        result[name] = torch.cat(parts, axis)
    return result

@case("Column-parallel layer 2.0: its input's gradient not all-reduced over the ranks",
      "mlp", F64, {"tensor": 2}, "tensor-sum-missing")
def column_input(s: Setup) -> Gradients:
    """Identity forward and backward where the backward should be an all-reduce."""
    return unreduced_input(s, 2)

@case("Row-parallel layers add their bias on each of four ranks before the all-reduce",
      "mlp", F64, {"tensor": 4}, "own:bias-by-rank")
def bias_by_rank(s: Setup) -> Gradients:
    """The bias comes in four times; each copy's gradient is right for what follows."""
    return gradient(s, s.loss(mlp_ranks(s, 4, extra=3.0), s.target))

@case("The output layer was registered after DDP: not all-reduced, rank 0's saved",
      "mlp", BF16, {"replicas": 2}, "replicas-missing")
def outside_ddp(s: Setup) -> Gradients:
    """Two replicas of 8 rows."""
    replicas = [mean(s, rows) for rows in pieces(s, 2)]
    result = times(total(replicas), 1 / 2)
    return result | {n: replicas[0][n] for n in ("4.weight", "4.bias")}

@case("Each pipeline stage clips by the norm of its own gradients",
      "mlp", F64, {"stages": 2, "microbatches": 4, "clip": 0.15, "cut": ["3"]}, "clipped-by-stage")
def clip_by_stage(s: Setup) -> Gradients:
    """No all-reduce of the squared norms over the pipeline."""
    right = pipeline(s, ["3"], 4)
    parts = [{n: g for n, g in right.items() if (int(n[0]) >= 3) == late} for late in (False, True)]
    return {n: g for part in parts for n, g in clipped(part, 0.15).items()}

@case("Forward with the weights of some steps ago, backward through the present ones (no weight stashing)",
      "mlp", F64, lambda s: {"stages": 5, "earlier": earlier(s, 11)}, "stale")
def no_stash(s: Setup) -> Gradients:
    """Asynchronous pipeline: weights were updated in place between forward and backward."""
    old, x = earlier(s, 11), s.inputs
    for i in range(5):
        name, layer = (f"{i}.0", s.model[i][0]) if i < 4 else ("4", s.model[4])
        now = layer(x)
        y = now + (functional.linear(x, old[f"{name}.weight"], old[f"{name}.bias"]) - now).detach()
        x = torch.tanh(y) if i < 4 else y
    return gradient(s, s.loss(x, s.target))

@case("zero_grad inside of the accumulation loop: the last micro-batch remains",
      "mlp", BF16, {"accumulation": 4}, "microbatches-missing")
def zero_inside(s: Setup) -> Gradients:
    """optimizer.zero_grad() before each backward."""
    for rows in pieces(s, 4):
        s.model.zero_grad()
        (s.loss(s.model(s.inputs[rows]), s.target[rows]) / 4).backward()
    return collected(s)

@case("Gradients divided by the world size (2 stages x 2 replicas), not by the number of replicas",
      "mlp", F64, {"replicas": 2, "stages": 2, "microbatches": 4}, "scaled")
def world_size(s: Setup) -> Gradients:
    """all_reduce(group=data) / dist.get_world_size()."""
    return times(total(mean(s, rows) for replica in pieces(s, 2, 4) for rows in replica), 1 / 4 / 4)

@case("All-reduce of layers 0 and 1 launched before the last of three accumulations; rank 1's saved",
      "mlp", F32, {"replicas": 2, "accumulation": 3}, "microbatches-missing")
def early_reduce(s: Setup) -> Gradients:
    """The last accumulation of these layers stays local; it is divided by the number of replicas as the rest."""
    replicas = pieces(s, 2, 3)
    result = total(share(s, rows) for replica in replicas for rows in replica)
    before = total(share(s, rows) for replica in replicas for rows in replica[:2])
    last = share(s, replicas[1][2])
    return result | {n: before[n] + last[n] for n in result if n[0] in "01"}

# ---------------------------------------------------------------- mlp, two mistakes

@case("Labels of the next micro-batch at the last stage; stage 0 forgets to divide by 4",
      "mlp", F64, {"stages": 3, "microbatches": 4, "cut": ["2", "4"]}, "own:labels-of-another", "scaled")
def labels_and_division(s: Setup) -> Gradients:
    """The label queue is one ahead, and round it goes."""
    found = pipeline(s, ["2", "4"], 4, label=lambda micro: (micro + 1) % 4)
    return {n: g * 4 if n[0] in "01" else g for n, g in found.items()}

@case("Replicas summed, not averaged; zero_grad after the first micro-batch's backward",
      "mlp", F32, {"replicas": 2, "microbatches": 3}, "scaled", "microbatches-missing")
def sum_and_first(s: Setup) -> Gradients:
    """The first of three micro-batches is lost on each replica."""
    return times(total(share(s, rows) for replica in pieces(s, 2, 3) for rows in replica[1:]), 2)

@case("Column-parallel input's gradient not all-reduced; norm for clipping counts replicated parameters on each rank",
      "mlp", F64, {"tensor": 2, "clip": 0.1}, "tensor-sum-missing", "scaled")
def column_and_norm(s: Setup) -> Gradients:
    """Squared norms are summed over both ranks, replicated parameters with them."""
    found = unreduced_input(s, 2)
    twice = {n: g for n, g in found.items() if n[0] == "4" or n in ("1.0.bias", "3.0.bias")}
    return clipped(found, 0.1, (norm(found) ** 2 + norm(twice) ** 2) ** 0.5)

@case("Clipped before the loss scale is taken out; 1.0.bias frozen by a left-over no-bias setting",
      "mlp", F32, {"loss_scale": 1024.0, "clip": 0.2}, "scaled", "frozen")
def scaled_clip(s: Setup) -> Gradients:
    """scaler.unscale_ after clip_grad_norm_."""
    s.model[1][0].bias.requires_grad_(False)
    (s.loss(s.model(s.inputs), s.target) * 1024).backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.2)
    return {n: None if g is None else g / 1024 for n, g in collected(s).items()}

@case("Last micro-batch never run backward; layer 1.0 left out of the all-reduce, rank 2's saved",
      "mlp", BF16, {"replicas": 4, "microbatches": 2}, "microbatches-missing", "replicas-missing")
def drop_and_local(s: Setup) -> Gradients:
    """range(count - 1) in the cool-down of each replica."""
    replicas = [times(mean(s, replica[0]), 1 / 2) for replica in pieces(s, 4, 2)]
    result = times(total(replicas), 1 / 4)
    return result | {n: replicas[2][n] for n in result if n.startswith("1.0")}

# ---------------------------------------------------------------- cnn, one mistake

@case("Batch norm takes its statistics by micro-batch", "cnn", F32, {"microbatches": 4}, "statistics-by-microbatch")
def norm_by_micro(s: Setup) -> Gradients:
    """Each micro-batch of four images alone."""
    return times(total(mean(s, rows) for rows in pieces(s, 4)), 1 / 4)

@case("Fused batch norm of block 3 takes its statistics for constants in backward",
      "cnn", F64, {}, "own:statistics-constant")
def constant_statistics(s: Setup) -> Gradients:
    """No gradient through mean and variance."""
    for bn in norms_of(s.model[3]):
        bn.forward = lambda x, bn=bn: by_batch(x, bn, detach=True)
    return whole(s)

class LocalBackward(torch.autograd.Function):
    """x normalised by the statistics of all replicas, whose backward sums over its own replica's rows alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, count: int) -> Tensor:
        """Normalised by all."""
        scale = (x.var((0, 2, 3), keepdim=True, unbiased=False) + eps).rsqrt()
        y = (x - x.mean((0, 2, 3), keepdim=True)) * scale
        ctx.save_for_backward(y, scale)
        ctx.count = count
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """The sums of each replica alone, by its own number of rows."""
        y, scale = ctx.saved_tensors
        result = []
        for gs, ys in zip(g.tensor_split(ctx.count), y.tensor_split(ctx.count), strict=True):
            along = (gs * ys).mean((0, 2, 3), keepdim=True)
            result.append((gs - gs.mean((0, 2, 3), keepdim=True) - ys * along) * scale)
        return torch.cat(result), None, None

@case("Synchronised batch norm: forward over all replicas, backward's sums not all-reduced",
      "cnn", F64, {"replicas": 4}, "own:statistics-backward-local")
def half_synchronised(s: Setup) -> Gradients:
    """A hand-written SyncBatchNorm without the all-reduce in backward."""
    for bn in norms_of(s.model):
        bn.forward = lambda x, bn=bn: (
            LocalBackward.apply(x, bn.eps, 4) * bn.weight[:, None, None] + bn.bias[:, None, None]
        )
    return whole(s)

@case("Convolutions of block 3 still frozen from fine-tuning", "cnn", BF16, {}, "frozen")
def frozen_convolutions(s: Setup) -> Gradients:
    """requires_grad is False: no .grad."""
    for name in ("conv1", "conv2"):
        getattr(s.model[3], name).weight.requires_grad_(False)
    s.loss(s.model(s.inputs), s.target).backward()
    return collected(s)

@case("Skip connection of block 4 carries no gradient (x.detach() in place of x.clone())",
      "cnn", F64, {}, "own:skip-detached")
def lost_skip(s: Setup) -> Gradients:
    """The identity was detached so that ReLU could be done in place."""
    block = s.model[4]

    def forward(x: Tensor) -> Tensor:
        inner = functional.relu(block.norm1(block.conv1(x)))
        return functional.relu(x.detach() + block.norm2(block.conv2(inner)))

    block.forward = forward
    return whole(s)

@case("Each parameter clipped by its own norm", "cnn", F32, {"clip": 0.1}, "clipped-by-parameter")
def clip_by_parameter(s: Setup) -> Gradients:
    """for p in parameters: clip_grad_norm_(p, bound)."""
    return {n: clipped({n: g}, 0.1)[n] for n, g in whole(s).items()}

@case("ZeRO: the flat gradient is cut into four shards of N // 4; the remainder is lost",
      "cnn", F64, {"replicas": 4}, "own:shard-remainder-lost")
def lost_remainder(s: Setup) -> Gradients:
    """Batch norm is synchronised; 2590 % 4 == 2 numbers at the end stay zero."""
    right = whole(s)
    flat = torch.cat([g.flatten() for g in right.values()])
    flat[len(flat) // 4 * 4 :] = 0
    parts = flat.split([g.numel() for g in right.values()])
    return {n: part.view_as(g) for (n, g), part in zip(right.items(), parts, strict=True)}

@case("Batch norms of block 4 in eval mode: running statistics", "cnn", F32, {}, "evaluation-mode")
def partly_eval(s: Setup) -> Gradients:
    """model[4].eval() was never undone."""
    s.model[4].eval()
    return whole(s)

# ---------------------------------------------------------------- cnn, two mistakes

@case("Batch norm by replica; gradients summed over replicas, not averaged",
      "cnn", F32, {"replicas": 2}, "statistics-by-microbatch", "scaled")
def replicas_apart(s: Setup) -> Gradients:
    """No SyncBatchNorm, ReduceOp.SUM."""
    return total(mean(s, rows) for rows in pieces(s, 2))

@case("Batch norm by micro-batch; the last of four micro-batches is never run",
      "cnn", F64, {"microbatches": 4}, "statistics-by-microbatch", "microbatches-missing")
def micro_and_last(s: Setup) -> Gradients:
    """Three of four, each by 1/4."""
    return times(total(mean(s, rows) for rows in pieces(s, 4)[:3]), 1 / 4)

@case("Batch norm by micro-batch; each micro-batch's gradients clipped, then averaged",
      "cnn", F64, {"accumulation": 2, "clip": 0.25}, "statistics-by-microbatch", "clipped-before-averaging")
def micro_and_clip(s: Setup) -> Gradients:
    """clip_grad_norm_ in the accumulation loop, on gradients of that micro-batch."""
    return times(total(clipped(mean(s, rows), 0.25) for rows in pieces(s, 2)), 1 / 2)

@case("Whole model in eval mode; loss not divided by the accumulation steps",
      "cnn", BF16, {"accumulation": 4}, "evaluation-mode", "scaled")
def eval_and_sum(s: Setup) -> Gradients:
    """After a validation, model.train() was forgotten."""
    s.model.eval()
    return total(mean(s, rows) for rows in pieces(s, 4))

# ---------------------------------------------------------------- gpt, one mistake

@case("Each replica's mean over its own tokens, then averaged over replicas",
      "gpt", F32, {"replicas": 3}, "mean-of-means")
def mean_of_means(s: Setup) -> Gradients:
    """DDP's average; replicas differ in real tokens (and have 6, 5, 5 rows)."""
    return times(total(mean(s, rows) for rows in pieces(s, 3)), 1 / 3)

def tied_apart(s: Setup, *counts: int, by_tokens: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients with the embedding's use only in words.weight, and what the output layer gives, apart."""
    copy = s.model.words.weight.detach().clone().requires_grad_()
    s.model.head.weight = nn.Parameter(copy)
    rows = pieces(s, *counts)
    for some in rows:
        part = weight(s, some) if by_tokens else 1 / len(rows)
        (s.loss(s.model(s.inputs[some]), s.target[some]) * part).backward()
    found = collected(s)
    return found, found.pop("head.weight")

@case("Tied embedding: the first stage's gradient is never added to the last stage's, whose copy is saved",
      "gpt", F64, {"stages": 4, "microbatches": 4}, "tie-missing")
def only_head(s: Setup) -> Gradients:
    """No all-reduce over the embedding group."""
    found, head = tied_apart(s, 4)
    return found | {"words.weight": head}

@case("Labels shifted by the data set and again by the loss", "gpt", F32, {}, "labels-shifted")
def shifted_twice(s: Setup) -> Gradients:
    """logits[:, :-1] against labels[:, 1:] of labels shifted already."""
    return gradient(s, s.loss(s.model(s.inputs)[:, :-1], s.target[:, 1:]))

@case("Padding has the label 0, which is not ignored", "gpt", F64, {"microbatches": 2}, "padding-counted")
def padding_learnt(s: Setup) -> Gradients:
    """labels = input_ids, padded by the pad token."""
    target = s.target.masked_fill(s.target == IGNORED, 0)
    values = [s.loss(s.model(s.inputs[rows]), target[rows]) / 2 for rows in pieces(s, 2)]
    return total(gradient(s, value) for value in values)

@case("Attention without the causal mask in each block", "gpt", BF16, {}, "own:mask-missing")
def no_mask(s: Setup) -> Gradients:
    """is_causal=False since a mask was meant to come in and was None."""
    for block in s.model.blocks:
        block.forward = lambda x, block=block: decoder(block, x, causal=False)
    return whole(s)

@case("Second stage checkpoints its first block re-entrantly on a received tensor that requires no gradient",
      "gpt", F32, {"stages": 2, "microbatches": 4, "cut": ["blocks.2"]}, "frozen")
def no_gradient_received(s: Setup) -> Gradients:
    """Reentrant checkpoint: no gradients of blocks.2, and none are sent back to the first stage."""
    first, _ = stages_of(s, ["blocks.2"])
    m = s.model
    for rows in pieces(s, 4):
        x = first(s.inputs[rows]).detach()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = checkpoint(m.blocks[2], x, use_reentrant=True)
        (s.loss(m.head(m.norm(m.blocks[3](x))), s.target[rows]) * weight(s, rows)).backward()
    return collected(s)

@case("Shards of qkv joined rank after rank, not q, k, v of all ranks each",
      "gpt", F64, {"tensor": 2}, "own:shards-joined-wrong")
def joined_wrong(s: Setup) -> Gradients:
    """torch.cat of what each rank has: [q0, k0, v0, q1, k1, v1]."""
    return {
        n: g.view(3, 2, -1, *g.shape[1:]).transpose(0, 1).reshape(g.shape) if ".qkv." in n else g
        for n, g in whole(s).items()
    }

@case("Row-parallel layers all-reduce in backward, too: branches get four times theirs",
      "gpt", F32, {"tensor": 4}, "tensor-sum-twice")
def reduced_backward(s: Setup) -> Gradients:
    """A differentiable all_reduce where the backward should be the identity."""
    for block in s.model.blocks:
        block.forward = lambda x, block=block: decoder(block, x, 4, reduce=lambda y: Times.apply(y, 4.0))
    return whole(s)

@case("Activations and gradients are sent between stages in bfloat16",
      "gpt", F32, {"stages": 4, "microbatches": 4}, "low-precision")
def low_wire(s: Setup) -> Gradients:
    """pipeline_dtype was left at bfloat16."""

    def send(stage: int, micro: int, x: Tensor) -> Tensor:
        return x.to(BF16).to(F32)

    return pipeline(s, ["blocks.1", "blocks.2", "blocks.3"], 4, send=send, back=send)

@case("Eight micro-batches' gradients accumulated in bfloat16", "gpt", F32, {"accumulation": 8}, "low-precision")
def low_sum(s: Setup) -> Gradients:
    """main_grad in bfloat16."""
    found = total({n: g.to(BF16) for n, g in share(s, rows).items()} for rows in pieces(s, 8))
    return {n: g.to(F32) for n, g in found.items()}

@case("Last stage's copy of the tied embedding not updated: output layer with weights of some steps ago",
      "gpt", F32, lambda s: {"stages": 2, "earlier": earlier(s, 23), "cut": ["blocks.2"]}, "stale")
def stale_head(s: Setup) -> Gradients:
    """Gradients of both copies are added properly."""
    s.model.head.weight = nn.Parameter(earlier(s, 23)["words.weight"])
    found = whole(s)
    return found | {"words.weight": found["words.weight"] + found.pop("head.weight")}

@case("Replica 3 reads the rows of replica 2", "gpt", BF16, {"replicas": 4}, "replicas-missing", "replicas-twice")
def same_rows(s: Setup) -> Gradients:
    """The sampler's rank is wrong on one; means are over all tokens that were read."""
    parts = pieces(s, 4)
    read = [parts[0], parts[1], parts[2], parts[2]]
    counts = [weight(s, rows) for rows in read]
    return total(times(mean(s, rows), count / sum(counts)) for rows, count in zip(read, counts, strict=True))

@case("Interleaved stages: rank 0's chunks (blocks 0, 2) saved as blocks 0, 1",
      "gpt", F64, {"stages": 2, "microbatches": 2}, "stages-swapped")
def swapped_names(s: Setup) -> Gradients:
    """Gradients of blocks.1 and blocks.2 under each other's names."""
    swap = {"blocks.1": "blocks.2", "blocks.2": "blocks.1"}
    found = total(share(s, rows) for rows in pieces(s, 2))
    return {swap.get(n[:8], n[:8]) + n[8:]: g for n, g in found.items()}

@case("The loss scale of 256 never taken out", "gpt", BF16, {"loss_scale": 256.0, "microbatches": 2}, "scaled")
def still_scaled(s: Setup) -> Gradients:
    """No scaler.unscale_ before the gradients are read."""
    values = [s.loss(s.model(s.inputs[rows]), s.target[rows]) * 256 * weight(s, rows) for rows in pieces(s, 2)]
    return total(gradient(s, value) for value in values)

@case("Each replica clips its own gradients, then all-reduce",
      "gpt", F64, {"replicas": 3, "clip": 0.5}, "clipped-before-averaging")
def clip_before_reduce(s: Setup) -> Gradients:
    """Replicas' losses are weighted by tokens, so that their average is the batch's mean."""
    return times(total(clipped(times(share(s, rows), 3), 0.5) for rows in pieces(s, 3)), 1 / 3)

# ---------------------------------------------------------------- gpt, two mistakes

@case("Tied embedding: the output layer's gradient is lost; each accumulation step's mean weighs the same",
      "gpt", F64, {"stages": 2, "accumulation": 3}, "tie-missing", "mean-of-means")
def tied_and_means(s: Setup) -> Gradients:
    """The first stage's copy is saved."""
    return tied_apart(s, 3, by_tokens=False)[0]

@case("Labels are the inputs, not shifted; replicas summed, not averaged",
      "gpt", F32, {"replicas": 2}, "labels-shifted", "scaled")
def unshifted_and_sum(s: Setup) -> Gradients:
    """The model does not shift, the data set neither."""
    same = s._replace(target=s.inputs.masked_fill(s.target == IGNORED, IGNORED))
    return times(total(share(same, rows) for rows in pieces(s, 2)), 2)

@case("Mean over padding, too (sum / all tokens); the tensor sent to the second stage is cut from its graph",
      "gpt", F64, {"stages": 2, "microbatches": 4, "cut": ["blocks.2"]}, "padding-counted", "frozen")
def denominator_and_cut(s: Setup) -> Gradients:
    """No gradients in the first stage; the tied embedding has those of the output layer."""
    first, second = stages_of(s, ["blocks.2"])
    for rows in pieces(s, 4):
        y = second(first(s.inputs[rows]).detach())
        target = s.target[rows]
        value = functional.cross_entropy(y.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
        (value / target.numel() / 4).backward()
    return collected(s)

@case("Tied embedding's gradient all-reduced twice over its group of two; blocks.1 has weights of some steps ago",
      "gpt", F32, lambda s: {"stages": 4, "earlier": earlier(s, 31)}, "tie-twice", "stale")
def doubled_and_stale(s: Setup) -> Gradients:
    """The second all-reduce adds two equal sums."""
    found = gradient_at(s, {n: w for n, w in earlier(s, 31).items() if n.startswith("blocks.1.")})
    return found | {"words.weight": found["words.weight"] * 2}

@case("blocks.2 without its causal mask; the last of five micro-batches is dropped",
      "gpt", BF16, {"microbatches": 5}, "own:mask-missing", "microbatches-missing")
def mask_and_last(s: Setup) -> Gradients:
    """drop_last, yet divided as before."""
    block = s.model.blocks[2]
    block.forward = lambda x: decoder(block, x, causal=False)
    return total(share(s, rows) for rows in pieces(s, 5)[:4])

@case("Sequence parallelism: norms' gradients of rank 0's tokens only; each stage clips by its own norm",
      "gpt", F64, {"tensor": 2, "stages": 2, "clip": 0.6, "cut": ["blocks.2"]},
      "tensor-sum-missing", "clipped-by-stage")
def sequence_and_clip(s: Setup) -> Gradients:
    """Layer norms are not marked sequence_parallel; the tied embedding is in both stages, the first's is saved."""

    def normed(module: nn.Module, x: Tensor) -> Tensor:
        mine, other = x.split(TOKENS // 2, 1)
        fixed = functional.layer_norm(other, module.normalized_shape, module.weight.detach(), module.bias.detach())
        return torch.cat([module(mine), fixed], 1)

    m = s.model
    x = m.words(s.inputs) + m.places.weight
    for block in m.blocks:
        x = decoder(block, x, 2, normed=normed)
    found = gradient(s, s.loss(m.head(normed(m.norm, x)), s.target))
    late = {n: g for n, g in found.items() if n.startswith(("blocks.2", "blocks.3", "norm", "words"))}
    early = {n: g for n, g in found.items() if n not in late or n == "words.weight"}
    return clipped(late, 0.6) | clipped(early, 0.6)

@case("Gradients all-reduced in bfloat16; the fourth replica's do not arrive",
      "gpt", F32, {"replicas": 4}, "low-precision", "replicas-missing")
def low_and_missing(s: Setup) -> Gradients:
    """A ring of one hop too few, with compressed messages."""
    found = total({n: g.to(BF16) for n, g in share(s, rows).items()} for rows in pieces(s, 4)[:3])
    return {n: g.to(F32) for n, g in found.items()}
