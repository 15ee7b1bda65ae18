"""Small networks, cut into any number of stages, and batches for them. Everything in float64."""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto


class Row(nn.Module):
    """Blocks in a row; what is a tuple is handed on as arguments. Shares no code with what is tested."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *values):
        for block in self.blocks:
            values = block(*values)
            values = values if isinstance(values, tuple) else (values,)
        return values if len(values) > 1 else values[0]


class Attention(nn.Module):
    """Pre-norm transformer block over [N, T, d]."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Open(nn.Module):
    """One tensor becomes three: a branch, a skip connection, and whole numbers that no gradient belongs to."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(6, width)

    def forward(self, x):
        h = self.linear(x)
        return h.tanh(), h, (x[:, 0] > 0).long()


class Middle(nn.Module):
    """Works on the branch, hands the skip connection through as it came."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.sign = nn.Embedding(2, width)

    def forward(self, h, skip, which):
        return (self.linear(h) + self.sign(which)).tanh(), skip, which


class Close(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, h, skip, which):
        return self.linear(h + skip)


def mlp_blocks():
    widths = [6, 7, 5, 8, 4]
    return [
        nn.Sequential(nn.Linear(a, b), nn.Tanh() if b != 4 else nn.Identity()) for a, b in itertools.pairwise(widths)
    ]


def cnn_blocks():
    def block(a, b):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    return [block(1, 3), block(3, 4), block(4, 3), nn.Sequential(nn.Flatten(), nn.Linear(3 * 16, 4))]


def transformer_blocks():
    return [
        nn.Sequential(nn.Embedding(11, 8), Attention(8)),
        Attention(8),
        Attention(8),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 11)),
    ]


def tuple_blocks():
    return [Open(5), Middle(5), Middle(5), Close(5)]


@stretto.mean  # without padding
def token_loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())


def features(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Network:
    blocks: Callable[[], Sequence[nn.Module]]
    batch: Callable[[torch.Generator], tuple[Any, torch.Tensor]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = cross_entropy
    head: str = "auto"

    def stages(self, count, seed=0):
        """The same weights for any number of stages, of at most four."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            blocks = list(self.blocks())
        cuts = torch.arange(4).tensor_split(count)
        return [Row([blocks[i] for i in cut]).double() for cut in cuts]

    def batches(self, count, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator) for _ in range(count)]


def labels(g, n=6, classes=4):
    return torch.randint(classes, (n,), generator=g)


NETWORKS = {
    "mlp": Network(mlp_blocks, lambda g: (features(g, 6, 6), labels(g))),
    "cnn": Network(cnn_blocks, lambda g: (features(g, 6, 1, 4, 4), labels(g))),
    "transformer": Network(
        transformer_blocks,
        lambda g: (torch.randint(11, (3, 5), generator=g), torch.randint(11, (3, 5), generator=g)),
        token_loss,
    ),
    "tuples": Network(tuple_blocks, lambda g: (features(g, 6, 6), labels(g))),
}


def run(stages, x):
    """The stages as one model, by hand."""
    values = x if isinstance(x, tuple) else (x,)
    for stage in stages:
        values = stage(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values if len(values) > 1 else values[0]


def train_plainly(stages, loss, make_optimizer, make_scheduler, batches):
    """Plain PyTorch on copies of the stages: one model, one optimizer. Returns the copies and the losses."""
    model = nn.ModuleList(copy.deepcopy(list(stages))).train()
    optimizer = make_optimizer(list(model.parameters()))
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        value = loss(run(model, x), y)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(value.item())
    return model, losses


def state(modules):
    """Everything in the modules' state dicts, running statistics included, under one key each."""
    return {f"{i}.{k}": v for i, m in enumerate(modules) if m is not None for k, v in m.state_dict().items()}


def stepped_together(reference, trainer, batches, flush_after=None):
    """The losses of the reference and what the trainer returned, batch by batch; both flush after one of them."""
    losses, returned = [], []
    for n, (x, y) in enumerate(batches):
        losses.append(reference.step(x, y))
        returned.append(trainer.step(x, y))
        if n == flush_after:
            reference.flush()
            trainer.flush()
    return losses, returned


def assert_equal(found, wanted, tolerance=0.0):
    """Bit for bit, or within a relative tolerance of each tensor's largest entry."""
    found, wanted = state(found), state(wanted)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if tolerance == 0 or not value.is_floating_point():
            assert torch.equal(found[key], value), key
        else:
            error = (found[key] - value).abs().max() / value.abs().max().clamp_min(1e-3)
            assert error <= tolerance, f"{key}: relative error {error:.1e}"
