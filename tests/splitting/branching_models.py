"""Models without a list of blocks, which only torch.export can cut."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Unit(nn.Module):
    """A convolution, a norm that keeps statistics, a nonlinearity in place."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Branching(nn.Module):
    """Two branches, a skip from the first unit to the last, dropout, and a layer that only training has."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.left, self.right = Unit(3, 6), Unit(6, 6), Unit(6, 6)
        self.pool = nn.MaxPool2d(2)
        self.last = Unit(6, 6)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((6, 1, 1), 0.5))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        left = self.left(stem) * self.scale
        right = self.right(stem)
        joined = self.last(self.pool(left + right)) + self.pool(stem)
        if self.training and self.drop.p > 0:  # stochastic depth, as timm and Swin have it
            keep = torch.rand(joined.shape[0], 1, 1, 1, device=x.device, dtype=x.dtype) < 0.8
            joined = joined * keep / 0.8
        return self.head(self.drop(joined.mean((2, 3))))


class Tied(nn.Module):
    """Embedding and unembedding share a weight; positions count up to the length."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor, scale: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.arange(tokens.shape[1], device=x.device).unsqueeze(1) * 0.01
        if scale is not None:
            x = x * scale
        x = self.norm(x + torch.tanh(self.first(x)))
        with torch.no_grad():
            level = x.abs().mean((1, 2), keepdim=True)
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return self.out(self.norm(x + torch.tanh(self.second(x)) * level))


class Counting(nn.Module):
    """Counts its batches, and averages what it sees, in buffers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.training:
            self.count += 1
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y = torch.tanh(self.second(x - self.mean))
        return self.third(y) + x


class Moody(nn.Module):
    """Training and evaluation differ in every way: one has more, one has less, both have it but use something else."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.extra = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.first(x))
        noise = torch.randn_like(y) if self.training else y.cos()
        z = self.second(y)
        chosen = y if self.training else z  # both are there in either mode
        z = torch.sigmoid(z) * noise  # made before, used here
        if self.training:
            z = z + self.extra(x)
        w = self.third(torch.tanh(z))
        return (w, chosen) if self.training else (w * 2, y)


class Shared(nn.Module):
    """Works in place on views of what is used again later."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1.0
        left = y[:, :3]
        z = self.second(torch.tanh(x))
        left.mul_(2.0).add_(z[:, 3:])
        return self.third(torch.tanh(y)) + z


class Regions(nn.Module):
    """Parts run under autocast and without gradients."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.second(y)
        with torch.no_grad():
            level = F.dropout(y, 0.3, self.training)  # in evaluation that is y itself, with its gradient
        return self.third(z + torch.tanh(y) * level)
