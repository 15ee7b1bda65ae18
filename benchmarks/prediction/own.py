"""Users' modules, with their data: none is among what calibration measures, and no plan was tuned for one."""

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


def images() -> tuple[Pair, Pair]:
    """Random images and classes."""
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 3, 24, 24, generator=draws), torch.randint(10, (512,), generator=draws)
    return (x, y), (x[:128], y[:128])
