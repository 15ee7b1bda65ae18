"""More of users' modules, with their data: written after every rule of the planner, and looked at by nobody before."""

from itertools import pairwise

import torch
from own import Pair, images, vectors
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, scaled_dot_product_attention, silu

__all__ = ["bulges", "dilated", "gated", "images", "sequences", "unet", "vectors", "vision"]


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of 3 x 3 pixels, each with a group norm."""
    pairs = ((nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs)) for width in (inputs, outputs))
    return nn.Sequential(*(layer for pair in pairs for layer in (*pair, nn.ReLU())))


class UNet(nn.Module):
    """Down to a quarter of the pixels' rows and up again, with what each size was on the way down."""

    def __init__(self, fine: int, middle: int, coarse: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([twice(3, fine), twice(fine, middle), twice(middle, coarse)])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairwise((coarse, middle, fine))])
        self.up, self.head = nn.ModuleList([twice(2 * w, w) for w in (middle, fine)]), nn.Linear(fine, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, 10]."""
        fine = self.down[0](x)
        middle = self.down[1](max_pool2d(fine, 2))
        x = self.down[2](max_pool2d(middle, 2))
        x = self.up[0](torch.cat([self.grow[0](x), middle], 1))
        x = self.up[1](torch.cat([self.grow[1](x), fine], 1))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def unet() -> nn.Module:
    """Two convolutions at each of three sizes down, and at two up."""
    return UNet(24, 48, 96)


class Gated(nn.Module):
    """A residual block whose hidden numbers are gated, behind a root-mean-square norm."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.both, self.down = nn.RMSNorm(width), nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, width]."""
        gate, value = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(silu(gate) * value)  # type: ignore[no-any-return]


def gated() -> nn.Module:
    """Seven gated blocks."""
    return nn.Sequential(nn.Linear(64, 224), *(Gated(224, 416) for _ in range(7)), nn.RMSNorm(224), nn.Linear(224, 10))


class Attending(nn.Module):
    """Attention and two linear layers, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] -> [N, tokens, width]."""
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """A vision transformer: a class token before 16 patches, and positions."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, width, 6, 6), nn.LayerNorm(width), nn.Linear(width, 10)
        self.token, self.positions = (nn.Parameter(0.02 * torch.randn(1, rows, width)) for rows in (1, 17))
        self.blocks = nn.ModuleList([Attending(width, heads) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, 24, 24] -> [N, 10]."""
        token, rows = self.token.expand(x.shape[0], -1, -1), self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([token, rows], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))  # type: ignore[no-any-return]


def vision() -> nn.Module:
    """Eight blocks of attention."""
    return Vision(120, 8, 6)


def dilated() -> nn.Module:
    """Convolutions along sequences, some with holes, two that halve the sequence; batch norms."""
    layers = list[nn.Module]()
    for (a, b), hole, stride in zip(pairwise((6, 40, 40, 80, 80, 112)), (1, 2, 1, 4, 1), (1, 1, 2, 1, 2), strict=True):
        convolution = nn.Conv1d(a, b, 5, stride, 2 * hole, hole, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm1d(b), nn.LeakyReLU(0.1)))
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(112, 10))


def bulges() -> nn.Module:
    """Layers from narrow to very wide and back, of unlike sizes, each with a norm."""
    pairs = pairwise((64, 32, 4096, 24, 48, 2048, 40, 3072, 32))
    layers = (nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.ELU()) for a, b in pairs)
    return nn.Sequential(*layers, nn.Linear(32, 10))


def sequences() -> tuple[Pair, Pair]:
    """Random walks of six numbers over 128 steps, and classes."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 6, 128, generator=draws).cumsum(2) / 8, torch.randint(10, (512,), generator=draws)
    return (x, y), (x[:128], y[:128])
