"""Random networks, twice: as modules for Stretto, and as formulas for a reference that shares no code with it.

A stage is a list of `Op`. `Stage` is the module. `run` computes the same by formulas, where each weight has two values:
the one that the forward sees and the one that the backward reads when it computes the gradient of an op's input.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn import functional as F

import stretto

VOCABULARY, TOKENS = 7, 5


@dataclass(frozen=True)
class Op:
    """One step of a stage: what it does, its sizes, and the name of its submodule if it has weights."""

    kind: str
    sizes: tuple = ()
    name: str = ""


class Attention(nn.Module):
    """Causal or full self-attention by torch's own module."""

    def __init__(self, width, heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Positions(nn.Module):
    """A learned vector for each position, added."""

    def __init__(self, tokens, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width) * 0.1)

    def forward(self, x):
        return x + self.weight


class Scale(nn.Module):
    """A learned number for each feature, multiplied."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Unused(nn.Module):
    """A weight that no forward touches."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x


LAYERS = {
    "linear": nn.Linear,
    "unbiased": lambda a, b: nn.Linear(a, b, bias=False),
    "conv": lambda a, b, stride: nn.Conv2d(a, b, 3, stride, padding=1),
    "grouped": lambda a: nn.Conv2d(a, a, 3, padding=1, groups=a, bias=False),
    "batch1": nn.BatchNorm1d,
    "batch2": nn.BatchNorm2d,
    "batch-average": lambda a: nn.BatchNorm2d(a, momentum=None),
    "group": lambda groups, a: nn.GroupNorm(groups, a),
    "layer": nn.LayerNorm,
    "rms": lambda a: nn.RMSNorm(a, eps=1e-6),
    "prelu": nn.PReLU,
    "embed": nn.Embedding,
    "attention": Attention,
    "positions": Positions,
    "scale": Scale,
    "unused": Unused,
    "dropout": nn.Dropout,
}

PLAIN = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "flatten": lambda x: x.flatten(1),
    "pool": lambda x: x.flatten(2).mean(2),
    "mean": lambda x: x.mean(1),
    "maxpool": lambda x: F.max_pool2d(x, 2),
}


class Stage(nn.Module):
    """The ops as torch's modules. "keep" puts the values aside, as a further output of the stage; "add" takes them."""

    def __init__(self, ops):
        super().__init__()
        self.ops = ops
        for op in ops:
            if op.kind in LAYERS:
                self.add_module(op.name, LAYERS[op.kind](*op.sizes))

    def forward(self, x, *kept):
        kept = list(kept)
        for op in self.ops:
            if op.kind == "keep":
                kept.append(x)
            elif op.kind == "add":
                x = x + kept.pop()
            elif op.kind in PLAIN:
                x = PLAIN[op.kind](x)
            else:
                x = getattr(self, op.name)(x)
        return (x, *kept) if kept else x


# -- the reference's own formulas -------------------------------------------------------------------------------------


def twofold(formula, x, seen, read):
    """formula(x, *weights), linear in the weights: seen by the forward and by the weights' own gradients; `read`
    decides the gradient of x."""
    if all(a is b for a, b in zip(seen, read, strict=True)) or not x.requires_grad:
        return formula(x, *seen)
    value = formula(x.detach(), *seen)
    path = formula(x, *[None if each is None else each.detach() for each in read])
    return value + (path - path.detach())


def normalised(x, dims, eps):
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(dims, keepdim=True) + eps).sqrt()


def batch_norm(x, buffers, name, moving, momentum):
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    if moving:
        with torch.no_grad():
            mean = x.mean(dims)
            variance = (x - shaped(mean, x)).square().mean(dims) * count / (count - 1)
            steps = buffers[f"{name}.num_batches_tracked"] = buffers[f"{name}.num_batches_tracked"] + 1
            by = 1 / steps.item() if momentum is None else momentum
            for key, value in (("running_mean", mean), ("running_var", variance)):
                buffers[f"{name}.{key}"] = (1 - by) * buffers[f"{name}.{key}"] + by * value
    return normalised(x, dims, 1e-5)


def shaped(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def attend(qkv, heads):
    n, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (part.view(n, tokens, heads, -1).transpose(1, 2) for part in qkv.split(width, 2))
    scores = torch.softmax(q @ k.transpose(2, 3) / (width // heads) ** 0.5, 3)
    return (scores @ v).transpose(1, 2).reshape(n, tokens, width)


def run(ops, seen, read, buffers, given, moving):
    """What a stage gives: `seen` and `read` are its weights by name, `buffers` change if `moving`."""
    x, *kept = given
    for op in ops:
        if op.kind == "keep":
            kept.append(x)
        elif op.kind == "add":
            x = x + kept.pop()
        elif op.kind in PLAIN:
            x = PLAIN[op.kind](x)
        else:
            x = weighed(op, seen, read, buffers, x, moving)
    return (x, *kept)


def weighed(op, seen, read, buffers, x, moving):
    def use(formula, values, *keys):
        names = [f"{op.name}.{key}" for key in keys]
        return twofold(formula, values, [seen[name] for name in names], [read[name] for name in names])

    kind = op.kind
    if kind == "linear":
        return use(lambda v, w, b: v @ w.T + b, x, "weight", "bias")
    if kind == "unbiased":
        return use(lambda v, w: v @ w.T, x, "weight")
    if kind == "conv":
        return use(lambda v, w, b: F.conv2d(v, w, b, op.sizes[2], 1), x, "weight", "bias")
    if kind == "grouped":
        return use(lambda v, w: F.conv2d(v, w, None, 1, 1, groups=op.sizes[0]), x, "weight")
    if kind in ("batch1", "batch2", "batch-average"):
        x = batch_norm(x, buffers, op.name, moving, None if kind == "batch-average" else 0.1)
        return use(lambda v, w, b: v * shaped(w, v) + shaped(b, v), x, "weight", "bias")
    if kind == "group":
        grouped = x.unflatten(1, (op.sizes[0], -1))
        x = normalised(grouped, list(range(2, grouped.dim())), 1e-5).flatten(1, 2)
        return use(lambda v, w, b: v * shaped(w, v) + shaped(b, v), x, "weight", "bias")
    if kind == "layer":
        return use(lambda v, w, b: v * w + b, normalised(x, [-1], 1e-5), "weight", "bias")
    if kind == "rms":
        return use(lambda v, w: v * w, x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), "weight")
    if kind == "prelu":
        return use(lambda v, w: torch.where(v > 0, v, v * w), x, "weight")
    if kind == "embed":
        return seen[f"{op.name}.weight"][x]
    if kind == "positions":
        return x + seen[f"{op.name}.weight"]
    if kind == "scale":
        return use(lambda v, w: v * w, x, "weight")
    if kind == "attention":
        qkv = use(lambda v, w, b: v @ w.T + b, x, "inner.in_proj_weight", "inner.in_proj_bias")
        return use(
            lambda v, w, b: v @ w.T + b, attend(qkv, op.sizes[1]), "inner.out_proj.weight", "inner.out_proj.bias"
        )
    assert kind in ("unused", "dropout"), kind
    return x


# -- random networks --------------------------------------------------------------------------------------------------


@dataclass
class Network:
    """Stages as ops, and what they are trained on. `tied`: (stage, name) of a weight and its owner's."""

    stages: list
    family: str
    loss: object
    batch: object  # (generator, size) -> x, y
    tied: dict
    frozen: set  # (stage, name of an op)
    norms: bool  # whether examples of a batch depend on each other (BatchNorm)
    head: object  # (stage, ops' outputs) -> an auxiliary head for a stage's first output
    dropout: bool = False
    shortest: list = field(default_factory=lambda: [0])  # how many words an example asks for at least

    def modules(self, seed, dtype=torch.float64):
        """Stretto's stages, with the weights of `seed`."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made = [Stage(ops).to(dtype) for ops in self.stages]
            for stage in made:
                for parameter in stage.parameters():
                    if parameter.dim() < 2:
                        parameter.data += 0.1 * torch.randn_like(parameter)
        for (user, name), (owner, owned) in self.tied.items():
            holder, _, attribute = name.rpartition(".")
            weight = made[owner].get_parameter(owned)
            setattr(made[user].get_submodule(holder), attribute, weight)
        for stage, name in self.frozen:
            for parameter in getattr(made[stage], name).parameters():
                parameter.requires_grad_(False)
        return made


def named(ops):
    return [
        replace(op, name=f"{op.kind.replace('-', '_')}{i}") if op.kind in LAYERS else op for i, op in enumerate(ops)
    ]


def cut(draw, blocks, num_stages):
    """Blocks to stages; where there are fewer blocks, stages of an activation only."""
    while len(blocks) < num_stages:
        blocks = [*blocks[:-1], [Op("tanh")], blocks[-1]]
    places = sorted(draw.sample(range(1, len(blocks)), num_stages - 1))
    parts = [blocks[a:b] for a, b in zip([0, *places], [*places, len(blocks)], strict=True)]
    return [named([op for block in part for op in block]) for part in parts]


def mlp(draw, num_stages):
    norm = draw.choice([None, None, "batch1", "layer", "group", "rms"])
    width, classes = draw.choice([4, 6]), 3
    blocks, open_skips = [[Op("linear", (4, width)), Op("tanh")]], 0
    for _ in range(num_stages + draw.randrange(3)):
        block = [Op("linear", (width, width))]
        if norm:
            block.append(Op(norm, (2, width) if norm == "group" else (width,)))
        block.append(Op(draw.choice(["tanh", "gelu", "silu", "relu"])) if draw.random() < 0.85 else Op("prelu"))
        if draw.random() < 0.2:
            block.append(Op("scale", (width,)))
        if draw.random() < 0.08:
            block.append(Op("unused", (width,)))
        if open_skips and draw.random() < 0.5:
            block.append(Op("add"))
            open_skips -= 1
        if draw.random() < 0.3:
            block.append(Op("keep"))
            open_skips += 1
        blocks.append(block)
    regression = draw.random() < 0.3
    blocks.append([*[Op("add")] * open_skips, Op("linear", (width, classes))])
    stages = cut(draw, blocks, num_stages)

    def batch(generator, size):
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        if regression:
            return x, torch.randn(size, classes, generator=generator, dtype=torch.float64)
        return x, torch.randint(classes, (size,), generator=generator)

    smooth = draw.choice([0.0, 0.1])
    loss = F.mse_loss if regression else lambda output, target: F.cross_entropy(output, target, label_smoothing=smooth)
    return Network(
        stages, "mlp", loss, batch, {}, set(), norm == "batch1", lambda features: Pooled(features[1], classes, 1)
    )


class Pooled(nn.Module):
    """A head for images or words: the mean over places, then a linear layer."""

    def __init__(self, width, classes, dim):
        super().__init__()
        self.dim = dim
        self.out = nn.Linear(width, classes)

    def forward(self, x, *_):
        if x.dim() > 2:
            x = x.flatten(2).mean(2) if self.dim == 1 else x.mean(1)
        return self.out(x)


def cnn(draw, num_stages):
    norm = draw.choice([None, "batch2", "batch2", "batch-average", "group"])
    channels, classes = draw.choice([2, 4]), 3
    blocks = [[Op("conv", (1, channels, draw.choice([1, 2]))), Op("relu")]]
    open_skips = 0
    for _ in range(num_stages + draw.randrange(2)):
        block = [Op("conv", (channels, channels, 1)) if draw.random() < 0.75 else Op("grouped", (channels,))]
        if norm:
            block.append(Op(norm, (2, channels) if norm == "group" else (channels,)))
        block.append(Op(draw.choice(["relu", "tanh", "prelu"])))
        if open_skips and draw.random() < 0.5:
            block.append(Op("add"))
            open_skips -= 1
        if draw.random() < 0.25:
            block.append(Op("keep"))
            open_skips += 1
        blocks.append(block)
    blocks.append([*[Op("add")] * open_skips, Op("pool"), Op("linear", (channels, classes))])
    stages = cut(draw, blocks, num_stages)

    def batch(generator, size):
        x = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
        return x, torch.randint(classes, (size,), generator=generator)

    norms = norm in ("batch2", "batch-average")
    return Network(
        stages, "cnn", F.cross_entropy, batch, {}, set(), norms, lambda features: Pooled(features[1], classes, 1)
    )


def token_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def summed_token_loss(output, target):
    """The sum over all tokens that are asked for, and how many they are."""
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total, (target != -100).sum()


def for_stretto(loss):
    """The loss as a Trainer is to be given it: a mean over words is one over examples where all have as many."""
    return stretto.mean(loss) if loss is token_loss else loss


class WordHead(nn.Module):
    """A head that gives each place's words."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x, *_):
        return self.out(self.norm(x))


def transformer(draw, num_stages, *, padded=False):
    width = 4
    blocks = [[Op("embed", (VOCABULARY, width)), Op("positions", (TOKENS, width))]]
    for _ in range(max(1, num_stages - 1)):
        blocks.append([Op("keep"), Op(draw.choice(["layer", "rms"]), (width,)), Op("attention", (width, 2)), Op("add")])
        if draw.random() < 0.7:
            inner = [Op("linear", (width, 6)), Op("gelu"), Op("linear", (6, width))]
            blocks.append([Op("keep"), Op("layer", (width,)), *inner, Op("add")])
    words = padded or draw.random() < 0.6
    tie = words and draw.random() < 0.5
    blocks.append(
        [Op("layer", (width,)), Op("unbiased", (width, VOCABULARY))]
        if words
        else [Op("layer", (width,)), Op("mean"), Op("linear", (width, 3))]
    )
    # A block may also be cut between its "keep" and its "add": then the skip travels.
    if draw.random() < 0.4:
        blocks = [[op] for block in blocks for op in block]
    stages = cut(draw, blocks, num_stages)
    tied = {}
    if tie and num_stages > 1:
        last = num_stages - 1
        (head,) = [op for op in stages[last] if op.kind == "unbiased"]
        (embed,) = [op for op in stages[0] if op.kind == "embed"]
        tied = {(last, f"{head.name}.weight"): (0, f"{embed.name}.weight")}

    shortest = [0]

    def batch(generator, size):
        x = torch.randint(VOCABULARY, (size, TOKENS), generator=generator)
        if not words:
            return x, torch.randint(3, (size,), generator=generator)
        y = torch.randint(VOCABULARY, (size, TOKENS), generator=generator)
        if padded:
            lengths = torch.randint(shortest[0], TOKENS + 1, (size,), generator=generator)
            lengths[int(torch.randint(size, (), generator=generator))] = TOKENS
            y = torch.where(torch.arange(TOKENS) < lengths[:, None], y, -100)
        return x, y

    loss = summed_token_loss if padded else token_loss if words else F.cross_entropy
    head = (lambda features: WordHead(features[-1])) if words else (lambda features: Pooled(features[-1], 3, 2))
    return Network(stages, "transformer", loss, batch, tied, set(), False, head, shortest=shortest)


def freeze(draw, network):
    """Some ops get weights that nobody trains; never a tied one."""
    tied = {(stage, name.split(".")[0]) for pair in network.tied.items() for stage, name in pair}
    for stage, ops in enumerate(network.stages):
        for op in ops:
            if op.kind in LAYERS and (stage, op.name) not in tied and draw.random() < 0.25:
                network.frozen.add((stage, op.name))


def drop_out(draw, network):
    """Dropout behind some activations; a reference by formulas does not know it."""
    network.dropout = True
    for stage, ops in enumerate(network.stages):
        made = []
        for op in ops:
            made.append(op)
            if op.kind in ("tanh", "relu", "gelu", "silu") and draw.random() < 0.5:
                made.append(Op("dropout", (0.3,), f"dropout{len(made)}"))
        network.stages[stage] = made
