"""Fifty mistakes of real trainers, made by hand in plain PyTorch, without Stretto and without a look at its names."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from networks import IGNORED, TOKENS, WIDTH, Case, Setup
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
Gradients = dict[str, Tensor | None]
Full = dict[str, Tensor]
CASES: list[Case] = []


def case(title: str, network: str, dtype: torch.dtype, truth: str, told: Any = None, **options: Any) -> Any:
    """Puts the function below it into CASES; `told`: options as a function of the Setup."""

    def put(function: Callable[[Setup], Gradients]) -> Callable[[Setup], Gradients]:
        CASES.append(Case(title, network, dtype, function, tuple(truth.split()), told or options))
        return function

    return put


# What trainers are made of


def split(x: Tensor, y: Tensor, n: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets in n pieces of rows in a row."""
    return list(zip(x.tensor_split(n), y.tensor_split(n), strict=True))


def parts(s: Setup, n: int) -> list[tuple[Tensor, Tensor]]:
    """The batch in n pieces."""
    return split(s.inputs, s.target, n)


def share(s: Setup, y: Tensor) -> float:
    """The part of the targets that count which is in y."""
    return int((y != IGNORED).sum()) / int((s.target != IGNORED).sum())


def gradient(s: Setup, x: Tensor, y: Tensor, weight: float = 1.0, model: nn.Module | None = None) -> Full:
    """The gradients of weight x loss."""
    named = dict((model or s.model).named_parameters())
    value = s.loss((model or s.model)(x), y) * weight
    return dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))


def whole(s: Setup) -> Full:
    """The right gradients."""
    return gradient(s, s.inputs, s.target)


def add(many: Sequence[Full]) -> Full:
    """The sum, one after the other."""
    total = {name: value.clone() for name, value in many[0].items()}
    for one in many[1:]:
        for name, value in one.items():
            total[name] += value
    return total


def times(gradients: Full, factor: float, where: Callable[[str], bool] = lambda name: True) -> Full:
    """Each of those where `where` says so, times a factor."""
    return {name: value * factor if where(name) else value for name, value in gradients.items()}


def norm(gradients: Full) -> float:
    """The norm of them all."""
    return float(torch.stack([value.double().norm() for value in gradients.values()]).norm())


def clipped(gradients: Full, bound: float) -> Full:
    """Clipped by the norm of those given."""
    return times(gradients, min(1.0, bound / (norm(gradients) + 1e-6)))


def without(gradients: Full, where: Callable[[str], bool]) -> Gradients:
    """None for those where `where` says so, as for parameters that need no gradient."""
    return {name: None if where(name) else value for name, value in gradients.items()}


def earlier(s: Setup, seed: int) -> Full:
    """The weights of some steps ago: 2 % off."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in s.model.named_parameters():
        now = value.detach()
        noise = torch.randn(now.shape, generator=generator, dtype=F64).to(now.dtype)
        found[name] = now + 0.02 * now.square().mean().sqrt() * noise
    return found


def old_model(s: Setup, seed: int) -> nn.Module:
    """A copy of the model with the earlier weights."""
    model = copy.deepcopy(s.model)
    with torch.no_grad():
        for name, value in earlier(s, seed).items():
            model.get_parameter(name).copy_(value)
    return model


def layers(model: Any) -> list[Callable[[Tensor], Tensor]]:
    """The layers one after the other; in gpt: embedding, four blocks, head."""
    if isinstance(model, nn.Sequential):
        return list(model)
    embed = lambda tokens: model.words(tokens) + model.places.weight[: tokens.shape[1]]  # noqa: E731
    return [embed, *model.blocks, lambda x: model.head(model.norm(x))]


def by_stage(
    s: Setup,
    cuts: Sequence[int],
    n: int,
    *,
    sent: Callable[[int, list[Any]], list[Any]] = lambda stage, errors: errors,
    weigh: Callable[[int, int, str], float] = lambda stage, i, name: 1.0,
    saved: Callable[[int, int], int] = lambda stage, i: i,
    weight: Callable[[Setup, Tensor], float] = share,
    forward: Sequence[nn.Module] | None = None,
    models: Sequence[nn.Module] | None = None,
) -> Full:
    """A pipeline with recomputation: all forwards, then backwards from the last stage, n micro-batches."""
    bounds = [0, *cuts, None]
    models = models or [s.model] * (len(cuts) + 1)

    def run(model: nn.Module, stage: int, x: Tensor) -> Tensor:
        for layer in layers(model)[bounds[stage] : bounds[stage + 1]]:
            x = layer(x)
        return x

    pieces = parts(s, n)
    inputs = [[x for x, _ in pieces]]
    with torch.no_grad():
        for stage in range(len(cuts)):
            inputs.append([run((forward or models)[stage], stage, x) for x in inputs[-1]])
    total = {name: torch.zeros_like(value) for name, value in s.model.named_parameters()}
    errors: list[Any] = [None] * n
    for stage in reversed(range(len(cuts) + 1)):
        named = dict(models[stage].named_parameters())
        passed: list[Any] = []
        for i, (_, y) in enumerate(pieces):
            x = inputs[stage][saved(stage, i)].detach()
            x.requires_grad_(x.is_floating_point())
            out = run(models[stage], stage, x)
            if stage == len(cuts):
                out = s.loss(out, y) * weight(s, y)
            wanted = [*named.values(), x] if x.requires_grad else [*named.values()]
            found = torch.autograd.grad(out, wanted, errors[i], allow_unused=True)
            for name, value in zip(named, found, strict=False):
                if value is not None:
                    total[name] += weigh(stage, i, name) * value
            passed.append(found[-1])
        errors = sent(stage, passed)
    return total


class Copy(Function):
    """Into a tensor-parallel part: the same forward, the sum over the ranks backward."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Any:
        """Each rank's own."""
        return tuple(x.clone() for x in xs)

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> Any:
        """All-reduced."""
        return tuple(torch.stack(errors).sum(0) for _ in errors)


class Reduce(Function):
    """Out of a tensor-parallel part: the sum over the ranks forward, the same backward."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Any:
        """All-reduced."""
        return tuple(torch.stack(xs).sum(0) for _ in xs)

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> Any:
        """Each rank's own."""
        return tuple(error.clone() for error in errors)


class ReduceBoth(Reduce):
    """The same with an all-reduce backward, too, as a plain differentiable all-reduce has it."""

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> Any:
        """All-reduced once more."""
        return tuple(torch.stack(errors).sum(0) for _ in errors)


def shard(name: str, value: Tensor, rank: int, ranks: int) -> Tensor:
    """What a rank has of a parameter of gpt."""
    if ".qkv." in name:
        return value.unflatten(0, (3, ranks, -1))[:, rank].flatten(0, 1)
    if ".up." in name:
        return value.tensor_split(ranks)[rank]
    return value.tensor_split(ranks, 1)[rank] if name.endswith(("proj.weight", "down.weight")) else value


def merged(gradients: Sequence[Full]) -> Full:
    """The ranks' gradients put together; rank 0's where each has them all."""
    found = {}
    for name, value in gradients[0].items():
        pieces = [one[name] for one in gradients]
        if ".qkv." in name:
            value = torch.stack([one.unflatten(0, (3, -1)) for one in pieces], 1).flatten(0, 2)
        elif ".up." in name:
            value = torch.cat(pieces)
        elif name.endswith(("proj.weight", "down.weight")):
            value = torch.cat(pieces, 1)
        found[name] = value
    return found


def on_ranks(
    s: Setup,
    ranks: int,
    into: Callable[[int, str], Any] = lambda block, place: Copy.apply,
    out_of: Callable[[int, str], Any] = lambda block, place: Reduce.apply,
    weight: float = 1.0,
) -> list[Full]:
    """Tensor-parallel gpt, all ranks at once; each rank's gradients of its own shards."""
    named = {name: value.detach() for name, value in s.model.named_parameters()}
    mine = [{k: shard(k, v, r, ranks).clone().requires_grad_() for k, v in named.items()} for r in range(ranks)]

    def normed(x: Tensor, own: Full, at: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), own[at + ".weight"], own[at + ".bias"])

    def attention(x: Tensor, own: Full, at: str) -> Tensor:
        qkv = functional.linear(x, own[at + "qkv.weight"], own[at + "qkv.bias"])
        q, k, v = qkv.unflatten(-1, (3, -1, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return functional.linear(seen.transpose(1, 2).flatten(2), own[at + "proj.weight"])

    def two_layers(x: Tensor, own: Full, at: str) -> Tensor:
        inner = functional.linear(x, own[at + "up.weight"], own[at + "up.bias"])
        return functional.linear(functional.gelu(inner), own[at + "down.weight"])

    xs = [own["words.weight"][s.inputs] + own["places.weight"][: s.inputs.shape[1]] for own in mine]
    for block in range(4):
        at = f"blocks.{block}."
        for place, part, last in (("norm1", attention, "proj"), ("norm2", two_layers, "down")):
            inner = into(block, place)(*[normed(x, own, at + place) for x, own in zip(xs, mine, strict=True)])
            inner = [part(x, own, at) for x, own in zip(inner, mine, strict=True)]
            inner = out_of(block, place)(*inner)
            xs = [x + y + own[at + last + ".bias"] for x, y, own in zip(xs, inner, mine, strict=True)]
    outs = [functional.linear(normed(x, own, "norm"), own["words.weight"]) for x, own in zip(xs, mine, strict=True)]
    torch.stack([s.loss(out, s.target) * weight for out in outs]).sum().backward()
    return [{name: value.grad for name, value in own.items() if value.grad is not None} for own in mine]


def first_tokens_only(model: nn.Module, ranks: int) -> None:
    """Norms whose weights get rank 0's tokens' gradients only."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):

            def forward(x: Tensor, of: Any = module) -> Tensor:
                first, *others = x.tensor_split(ranks, 1)
                size, bias = of.weight.detach(), of.bias.detach()
                own = functional.layer_norm(first, (WIDTH,), of.weight, of.bias)
                return torch.cat([own, *[functional.layer_norm(other, (WIDTH,), size, bias) for other in others]], 1)

            module.forward = forward  # type: ignore[method-assign]


# One mistake each: perceptron


@case("the loss isn't divided by the accumulation steps", "mlp", BF16, "scaled", accumulation=4)
def accumulated_sum(s: Setup) -> Gradients:
    """Sum of four means."""
    return add([gradient(s, x, y) for x, y in parts(s, 4)])


@case("a mean by the global number of rows, then once more by the replicas", "mlp", F64, "scaled", replicas=3)
def twice_averaged(s: Setup) -> Gradients:
    """As with num_items_in_batch under DDP, which averages."""
    return times(add([gradient(s, x, y, share(s, y)) for x, y in parts(s, 3)]), 1 / 3)


@case(
    "the last stage's errors of micro-batches 1 and 2 change places", "mlp", F64, "own:microbatches-crossed",
    stages=2, microbatches=4, cut=["2"],
)  # fmt: skip
def crossed(s: Setup) -> Gradients:
    """Two receives posted in the wrong order."""
    return by_stage(s, [2], 4, sent=lambda stage, e: [e[0], e[2], e[1], e[3]] if stage == 1 else e)


@case("a stage's saved input is the next micro-batch's", "mlp", F32, "own:wrong-activation", stages=3, microbatches=4)
def overwritten(s: Setup) -> Gradients:
    """The middle stage recomputes from the buffer's next content."""
    return by_stage(s, [2, 4], 4, saved=lambda stage, i: min(i + 1, 3) if stage == 1 else i)


@case("the second stage has earlier weights", "mlp", F64, "stale", lambda s: {"stages": 2, "earlier": earlier(s, 3)})
def stale_stage(s: Setup) -> Gradients:
    """Its update comes after the step's start."""
    return by_stage(s, [3], 1, models=[s.model, old_model(s, 3)])


@case(
    "forward with earlier weights, backward with the present ones", "mlp", F64, "stale",
    lambda s: {"stages": 4, "microbatches": 4, "earlier": earlier(s, 5)},
)  # fmt: skip
def no_stash(s: Setup) -> Gradients:
    """An asynchronous pipeline that keeps no weights with its activations."""
    return by_stage(s, [1, 2, 3], 4, forward=[old_model(s, 5)] * 4)


@case("each replica clips before the all-reduce", "mlp", F32, "clipped-before-averaging", replicas=2, clip=0.1)
def clip_first(s: Setup) -> Gradients:
    """Mean of two clipped ones."""
    return times(add([clipped(gradient(s, x, y), 0.1) for x, y in parts(s, 2)]), 0.5)


@case("clips before it takes the loss scale out", "mlp", F32, "scaled", clip=0.1, loss_scale=256.0)
def clip_scaled(s: Setup) -> Gradients:
    """scaler.unscale_ after clip_grad_norm_."""
    return times(clipped(gradient(s, s.inputs, s.target, 256.0), 0.1), 1 / 256)


@case("sums micro-batches in a bfloat16 buffer", "mlp", F32, "low-precision", accumulation=8)
def low_sums(s: Setup) -> Gradients:
    """The model's in float32."""
    total = {name: torch.zeros_like(value, dtype=BF16) for name, value in s.model.named_parameters()}
    for x, y in parts(s, 8):
        for name, value in gradient(s, x, y, 1 / 8).items():
            total[name] += value.to(BF16)
    return {name: value.float() for name, value in total.items()}


@case("half precision saturates under the loss scale", "mlp", F32, "own:saturated", loss_scale=2.0**21)
def saturated(s: Setup) -> Gradients:
    """Clamped to the largest half, as some kernels do, then unscaled."""
    scaled = gradient(s, s.inputs, s.target, 2.0**21)
    return {name: value.clamp(-65504, 65504).half().float() / 2.0**21 for name, value in scaled.items()}


@case("all-reduces all so far after each micro-batch", "mlp", F64, "microbatches-twice", replicas=2, accumulation=4)
def reduced_each_time(s: Setup) -> Gradients:
    """An all-reduce that sums and no no_sync: the first micro-batches are counted 8, 4 and 2 times."""
    ranks = [split(x, y, 4) for x, y in parts(s, 2)]
    buffers: list[Full] = [{name: torch.zeros_like(v) for name, v in s.model.named_parameters()} for _ in ranks]
    for k in range(4):
        local = [add([b, gradient(s, *rank[k], share(s, rank[k][1]))]) for b, rank in zip(buffers, ranks, strict=True)]
        buffers = [add(local) for _ in ranks]
    return buffers[0]


@case("no all-reduce: rank 0's own gradients", "mlp", BF16, "replicas-missing", replicas=4)
def not_reduced(s: Setup) -> Gradients:
    """model.module was called past DDP."""
    return gradient(s, *parts(s, 4)[0])


@case("the sampler fills up three replicas with the first two rows", "mlp", F32, "own:rows-twice", replicas=3)
def filled_up(s: Setup) -> Gradients:
    """18 rows instead of 16."""
    return gradient(s, torch.cat([s.inputs, s.inputs[:2]]), torch.cat([s.target, s.target[:2]]))


@case("a loader of five rows leaves a micro-batch of one, with equal weight", "mlp", F32, "mean-of-means")
def one_row_left(s: Setup) -> Gradients:
    """5, 5, 5 and 1 rows, a mean of the four means."""
    pieces = zip(s.inputs.split(5), s.target.split(5), strict=True)
    return add([gradient(s, x, y, 1 / 4) for x, y in pieces])


@case("errors go to the stage before in eight bits", "mlp", F32, "low-precision", stages=2, microbatches=2)
def coarse_sends(s: Setup) -> Gradients:
    """A compressed send, without a scale."""
    return by_stage(s, [3], 2, sent=lambda stage, e: [x.to(torch.float8_e5m2).float() for x in e])


# One mistake each: residual network


@case("batch norm by micro-batch", "cnn", F64, "statistics-by-microbatch", microbatches=4)
def norm_by_microbatch(s: Setup) -> Gradients:
    """Right weights otherwise."""
    return add([gradient(s, x, y, share(s, y)) for x, y in parts(s, 4)])


@case("still in eval after the validation", "cnn", F32, "evaluation-mode")
def in_eval(s: Setup) -> Gradients:
    """Running statistics instead of the batch's."""
    s.model.eval()
    return whole(s)


@case("a checkpointed block is recomputed in eval", "cnn", F64, "evaluation-mode")
def recomputed_in_eval(s: Setup) -> Gradients:
    """The second block's backward is with its running statistics."""
    s.model(s.inputs)
    second: Any = copy.deepcopy(s.model)
    second[4].eval()
    return by_stage(s, [4, 5], 1, forward=[s.model] * 3, models=[s.model, second, s.model])


@case("the first block's skip is detached", "cnn", F64, "own:skip-detached")
def skip_detached(s: Setup) -> Gradients:
    """The identity was kept with .detach() to save memory."""
    block: Any = s.model.get_submodule("3")

    def forward(x: Tensor) -> Tensor:
        inner = functional.relu(block.norm1(block.conv1(x)))
        return functional.relu(x.detach() + block.norm2(block.conv2(inner)))

    block.forward = forward
    return whole(s)


@case("each replica reads rank 0's rows", "cnn", BF16, "replicas-missing", replicas=4)
def same_rows(s: Setup) -> Gradients:
    """The sampler doesn't know its rank; four times the same, averaged."""
    x, y = parts(s, 4)[0]
    return times(add([gradient(s, x, y) for _ in range(4)]), 1 / 4)


@case("one replica's labels are one row late", "cnn", F64, "own:labels-of-other-rows", replicas=4)
def late_labels(s: Setup) -> Gradients:
    """Batch norm is synchronised; labels of replica 1 come from another iterator."""
    target = s.target.clone()
    target[4:8] = target[4:8].roll(1)
    return gradient(s, s.inputs, target)


# One mistake each: language model


@case("each stage clips by its own norm", "gpt", F64, "clipped-by-stage", stages=2, clip=0.5)
def clip_by_stage(s: Setup) -> Gradients:
    """The norm isn't summed over the pipeline."""
    right = whole(s)
    late = {k: v for k, v in right.items() if k.startswith(("blocks.2", "blocks.3", "norm"))}
    early = {k: v for k, v in right.items() if k not in late}
    found = clipped(early, 0.5) | clipped(late, 0.5)
    return {name: found[name] for name in right}


@case("a mean of micro-batches' means over different numbers of tokens", "gpt", F64, "mean-of-means", accumulation=4)
def token_means(s: Setup) -> Gradients:
    """What transformers did until autumn 2024."""
    return add([gradient(s, x, y, 1 / 4) for x, y in parts(s, 4)])


@case("the first stage's embedding misses the head's gradient", "gpt", F32, "tie-missing", stages=4, microbatches=4)
def embedding_alone(s: Setup) -> Gradients:
    """No all-reduce in the embedding group."""
    return by_stage(s, [2, 3, 4], 4, weigh=lambda stage, i, name: float(name != "words.weight" or stage == 0))


@case("the tied weight is summed over both stages though both have the sum", "gpt", BF16, "tie-twice", stages=2)
def tied_twice(s: Setup) -> Gradients:
    """Twice its gradient."""
    return times(by_stage(s, [3], 1), 2.0, lambda name: name == "words.weight")


@case("padding counts, as token 0", "gpt", F64, "padding-counted")
def padding_counts(s: Setup) -> Gradients:
    """The collator pads labels with the pad token instead of -100."""
    return gradient(s, s.inputs, s.target.masked_fill(s.target == IGNORED, 0))


@case("a column-parallel layer's error isn't summed over the ranks", "gpt", F64, "tensor-sum-missing", tensor=4)
def no_sum_backward(s: Setup) -> Gradients:
    """The MLP of block 1 was called past the copy into the parallel region."""
    alone = lambda *xs: xs  # noqa: E731
    return merged(on_ranks(s, 4, into=lambda block, at: alone if (block, at) == (1, "norm2") else Copy.apply))


@case("a differentiable all-reduce after row-parallel layers sums twice", "gpt", F32, "tensor-sum-twice", tensor=2)
def sum_both_ways(s: Setup) -> Gradients:
    """In attention and MLP of all blocks."""
    return merged(on_ranks(s, 2, out_of=lambda block, at: ReduceBoth.apply))


@case("q, k, v of two ranks are put together rank by rank", "gpt", F64, "own:shards-misordered", tensor=2)
def qkv_order(s: Setup) -> Gradients:
    """q0 k0 v0 q1 k1 v1 instead of q0 q1 k0 k1 v0 v1."""
    ranks = on_ranks(s, 2)
    right = merged(ranks)
    return {k: torch.cat([one[k] for one in ranks]) if ".qkv." in k else v for k, v in right.items()}


@case("norms' gradients aren't summed over sequence-parallel ranks", "gpt", F32, "tensor-sum-missing", tensor=2)
def norms_of_half(s: Setup) -> Gradients:
    """Rank 0's are those of the first six tokens."""
    first_tokens_only(s.model, 2)
    return whole(s)


@case("no zero_grad: the step before is in it", "gpt", F64, "own:not-zeroed", lambda s: {"earlier": earlier(s, 11)})
def not_zeroed(s: Setup) -> Gradients:
    """An overfitting test: the same batch each step."""
    return add([gradient(s, s.inputs, s.target, model=old_model(s, 11)), whole(s)])


@case("positions begin at 0 again in the second half of the context", "gpt", F64, "own:positions-restart")
def positions_again(s: Setup) -> Gradients:
    """Context-parallel ranks that don't know their offset."""
    model: Any = s.model
    _, *rest = layers(model)
    x = model.words(s.inputs) + model.places.weight[torch.arange(TOKENS) % (TOKENS // 2)]
    for layer in rest:
        x = layer(x)
    s.loss(x, s.target).backward()
    return {name: value.grad for name, value in model.named_parameters()}


@case("the tied weight counts twice in the norm it clips by", "gpt", F64, "scaled", stages=2, clip=0.5)
def norm_of_tied(s: Setup) -> Gradients:
    """Once on the first and once on the last stage."""
    right = whole(s)
    return times(right, 0.5 / norm({**right, "again": right["words.weight"]}))


# Two mistakes each


@case(
    "biases of the last micro-batch; the first layer is frozen", "mlp", F64, "microbatches-missing frozen",
    microbatches=4,
)  # fmt: skip
def biases_and_frozen(s: Setup) -> Gradients:
    """Fused accumulation for weights only; requires_grad_(False) left from a warm-up."""
    many = [gradient(s, x, y, share(s, y)) for x, y in parts(s, 4)]
    found = {k: many[-1][k] if k.endswith("bias") else v for k, v in add(many).items()}
    return without(found, lambda name: name.startswith("0."))


@case(
    "skips the first micro-batch; clips each parameter alone", "mlp", F32, "microbatches-missing clipped-by-parameter",
    microbatches=8, clip=0.05,
)  # fmt: skip
def skips_and_clips(s: Setup) -> Gradients:
    """A loop from 1; clip_grad_norm_ in a loop over parameters."""
    found = add([gradient(s, x, y, share(s, y)) for x, y in parts(s, 8)[1:]])
    return {name: clipped({name: value}, 0.05)[name] for name, value in found.items()}


@case(
    "a mean of micro-batches' means; the tied weight has the head's gradient only",
    "gpt", F64, "mean-of-means tie-missing", stages=2, microbatches=4, cut=["blocks.2"],
)  # fmt: skip
def means_and_head(s: Setup) -> Gradients:
    """Saved from the last stage."""
    head = lambda stage, i, name: float(name != "words.weight" or stage == 1)  # noqa: E731
    return by_stage(s, [3], 4, weight=lambda s, y: 1 / 4, weigh=head)


@case("labels are shifted twice; no all-reduce", "gpt", F32, "labels-shifted replicas-missing", replicas=2)
def shifted_and_local(s: Setup) -> Gradients:
    """The model shifts labels that the data set has shifted already."""
    loss = lambda out, y: s.loss(out[:, :-1], y[:, 1:])  # noqa: E731
    return gradient(s._replace(loss=loss), *parts(s, 2)[0])


@case(
    "batch norm by micro-batch; no division by the steps", "cnn", F64, "statistics-by-microbatch scaled",
    replicas=2, accumulation=2,
)  # fmt: skip
def norms_and_sums(s: Setup) -> Gradients:
    """A sum over two steps, a mean over two replicas."""
    ranks = [add([gradient(s, *piece) for piece in split(x, y, 2)]) for x, y in parts(s, 2)]
    return times(add(ranks), 1 / 2)


@case(
    "batch norm by replica; a mean of means of 6, 5 and 5 rows", "cnn", F32, "statistics-by-microbatch mean-of-means",
    replicas=3,
)  # fmt: skip
def norms_and_means(s: Setup) -> Gradients:
    """DDP with three processes."""
    return times(add([gradient(s, x, y) for x, y in parts(s, 3)]), 1 / 3)


@case(
    "the last stage has earlier weights; the first stage gets errors twice", "mlp", F64, "stale scaled",
    lambda s: {"stages": 3, "cut": ["2", "4"], "microbatches": 2, "earlier": earlier(s, 23)},
)  # fmt: skip
def stale_and_twice(s: Setup) -> Gradients:
    """A receive buffer that is added to and not cleared."""
    models = [s.model, s.model, old_model(s, 23)]
    return by_stage(s, [2, 4], 2, models=models, sent=lambda stage, e: [2 * x for x in e] if stage == 1 else e)


@case(
    "the tied weight is summed twice; the first stage forgets micro-batch 2",
    "gpt", F64, "tie-twice microbatches-missing", stages=3, microbatches=4,
)  # fmt: skip
def tied_and_forgotten(s: Setup) -> Gradients:
    """One backward less on the first stage."""
    found = by_stage(s, [2, 4], 4, weigh=lambda stage, i, name: float(stage != 0 or i != 2))
    return times(found, 2.0, lambda name: name == "words.weight")


@case(
    "rank 0's shards stand for both ranks; sums over the replicas", "gpt", F64, "own:shard-repeated scaled",
    tensor=2, replicas=2,
)  # fmt: skip
def same_shards_and_sum(s: Setup) -> Gradients:
    """Both ranks write to one file; SUM instead of AVG."""
    halves = [s._replace(inputs=x, target=y) for x, y in parts(s, 2)]
    ranks = [on_ranks(half, 2, weight=2 * share(s, half.target)) for half in halves]
    return add([merged([rank[0], rank[0]]) for rank in ranks])


@case(
    "each replica's last micro-batch is dropped; the last layer keeps the loss scale",
    "mlp", F32, "microbatches-missing scaled", replicas=2, accumulation=3, loss_scale=1024.0,
)  # fmt: skip
def dropped_and_scaled(s: Setup) -> Gradients:
    """drop_last with 3, 3 and 2 rows; an optimizer of its own for the head isn't unscaled."""
    pieces = [piece for x, y in parts(s, 2) for piece in split(x, y, 3)[:2]]
    found = add([gradient(s, x, y, share(s, y)) for x, y in pieces])
    return times(found, 1024.0, lambda name: name.startswith("4."))


@case("a frozen backbone; a sum of the rows' losses", "cnn", F64, "frozen scaled")
def frozen_and_sum(s: Setup) -> Gradients:
    """All but the last layer has requires_grad False; reduction="sum"."""
    return without(times(whole(s), float(len(s.target))), lambda name: not name.startswith("7."))


@case(
    "blocks 1 and 2 change places; divides by the padding, too", "gpt", F32, "stages-swapped padding-counted",
    stages=4,
)  # fmt: skip
def swapped_and_padding(s: Setup) -> Gradients:
    """Interleaved stages saved in the wrong order; the loss is masked, then .mean()."""
    found = times(whole(s), float((s.target != IGNORED).float().mean()))
    other = {"blocks.1.": "blocks.2.", "blocks.2.": "blocks.1."}
    return {name: found[other.get(name[:9], name[:9]) + name[9:]] for name in found}


@case(
    "stages are detached; only the last micro-batch is left", "mlp", BF16, "frozen microbatches-missing",
    stages=2, microbatches=4,
)  # fmt: skip
def detached_and_last(s: Setup) -> Gradients:
    """The first stage has no gradients; zero_grad is in the loop."""
    x, y = parts(s, 4)[-1]
    return without(gradient(s, x, y, share(s, y)), lambda name: name.startswith(("0.", "1.", "2.")))


@case(
    "the second stage keeps the loss scale; the embedding misses the head's gradient",
    "gpt", BF16, "scaled tie-missing", loss_scale=1024.0, stages=2, cut=["blocks.2"],
)  # fmt: skip
def scaled_and_untied(s: Setup) -> Gradients:
    """A scaler on the first stage only; no all-reduce in the embedding group."""
    found = by_stage(s, [3], 1, weigh=lambda stage, i, name: float(name != "words.weight" or stage == 0))
    return times(found, 1024.0, lambda name: name.startswith(("blocks.2", "blocks.3", "norm")))


@case(
    "a convolution's gradient is transposed; divided by the replicas twice", "cnn", F32, "own:transposed scaled",
    replicas=4,
)  # fmt: skip
def transposed_and_small(s: Setup) -> Gradients:
    """A converter takes in for out channels; batch norm is synchronised."""
    found = times(whole(s), 1 / 4)
    found["3.conv2.weight"] = found["3.conv2.weight"].transpose(0, 1).contiguous()
    return dict(found)


@case(
    "norms' gradients of rank 0's tokens; not clipped", "gpt", F64, "tensor-sum-missing not-clipped",
    tensor=4, clip=0.5,
)  # fmt: skip
def norms_and_unclipped(s: Setup) -> Gradients:
    """The clipped copy isn't the one that is used."""
    first_tokens_only(s.model, 4)
    return whole(s)


@case(
    "errors come one micro-batch late; weight decay is in it", "mlp", F64, "own:microbatches-crossed decay-coupled",
    stages=2, microbatches=4,
)  # fmt: skip
def late_and_decayed(s: Setup) -> Gradients:
    """The first stage gets the micro-batch's before; 0.05 of each weight is added."""
    found = by_stage(s, [2], 4, sent=lambda stage, e: [e[-1], *e[:-1]] if stage == 1 else e)
    return {name: value + 0.05 * s.model.get_parameter(name).detach() for name, value in found.items()}
