"""Users' modules, with their data: none is among what calibration measures, and no plan was tuned for one."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

Pair = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual block of two linear layers behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[N, width] -> [N, width]."""
        mixed: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return mixed


def residual() -> nn.Module:
    """Eight residual blocks on vectors of 64 numbers."""
    return nn.Sequential(nn.Linear(64, 384), *(Block(384) for _ in range(8)), nn.Linear(384, 10))


def deep() -> nn.Module:
    """Sixteen narrow residual blocks."""
    return nn.Sequential(nn.Linear(64, 160), *(Block(160) for _ in range(16)), nn.Linear(160, 10))


def vectors() -> tuple[Pair, Pair]:
    """Vectors, and which of their first ten numbers is the largest."""
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    y = x[:, :10].argmax(1)
    return (x, y), (x[:256], y[:256])


def convolutions() -> nn.Module:
    """Six convolutions, two pools, and a linear layer on images of 24 x 24 pixels."""
    layers: list[nn.Module] = []
    channels = 3
    for number, outputs in enumerate((32, 32, 64, 64, 96, 96)):
        pool = [nn.MaxPool2d(2)] if number in (1, 3) else []
        layers.append(nn.Sequential(nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(), *pool))
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def large_kernels() -> nn.Module:
    """Kernels of 7, 5 and 3 pixels with batch norms on images of 24 x 24 pixels."""
    layers: list[nn.Module] = []
    channels = 3
    for kernel, outputs in ((7, 24), (5, 48), (5, 48), (3, 96)):
        convolution = nn.Conv2d(channels, outputs, kernel, padding=kernel // 2, bias=False)
        layers.append(nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU()))
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Recurrent(nn.Module):
    """A GRU along the numbers of a vector, eight at a time."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, steps, inputs] -> [N, steps, width]."""
        return self.gru(x)[0]  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """Mixes tokens, then channels, each behind a norm."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] -> [N, tokens, width]."""
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channels(self.norms[1](x))
        return mixed


class Patches(nn.Module):
    """Images as a row of patches."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, side, stride=side)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] -> [N, patches, width]."""
        cut: Tensor = self.cut(x)
        return cut.flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """[N, tokens, width] -> [N, width]."""
        return x.mean(1)


def encoder() -> nn.Module:
    """Six encoder layers of torch's on 36 patches."""
    layers = (nn.TransformerEncoderLayer(96, 4, 256, dropout=0.0, batch_first=True) for _ in range(6))
    return nn.Sequential(Patches(4, 96), *layers, Mean(), nn.Linear(96, 10))


def depthwise() -> nn.Module:
    """Depthwise and pointwise convolutions with batch norms."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1, bias=False)]
    for _ in range(5):
        pair = [nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False), nn.Conv2d(48, 48, 1, bias=False)]
        layers.append(nn.Sequential(*pair, nn.BatchNorm2d(48), nn.ReLU6()))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def wide() -> nn.Module:
    """Four wide layers with dropout, and a narrow waist."""
    widths = (64, 1024, 768, 64, 768)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Dropout(0.1), nn.SiLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def mixer() -> nn.Module:
    """Six mixer blocks on 16 patches."""
    return nn.Sequential(Patches(6, 128), *(Mixer(16, 128) for _ in range(6)), Mean(), nn.Linear(128, 10))


def recurrent() -> nn.Module:
    """Three GRUs on eight steps of eight numbers."""
    rows = nn.Unflatten(1, (8, 8))
    return nn.Sequential(rows, Recurrent(8, 128), Recurrent(128, 128), Recurrent(128, 128), Mean(), nn.Linear(128, 10))


def images() -> tuple[Pair, Pair]:
    """Random images and classes."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 3, 24, 24, generator=draws), torch.randint(10, (512,), generator=draws)
    return (x, y), (x[:128], y[:128])
