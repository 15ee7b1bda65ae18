"""AlexNet (Krizhevsky et al. 2012) in one column, as the reference implementation of Caffe orders its layers."""

from collections.abc import Callable
from functools import partial

from torch import nn

from stretto.models.model import Recipe

SIDE = 227


def alexnet(*, classes: int = 1000) -> Recipe:
    """15 layers, [N, 3, 227, 227] -> ... -> [N, classes]: two groups in the second, fourth and fifth convolution.

    The first two ReLUs are layers of their own, the others change their operand in place; no dropout.
    """

    def convolution(inputs: int, outputs: int, kernel: int, *, groups: int = 1, stride: int = 1) -> nn.Module:
        return nn.Conv2d(inputs, outputs, kernel, stride, padding=0 if stride > 1 else kernel // 2, groups=groups)

    def activated(make: Callable[[], nn.Module]) -> nn.Module:
        return nn.Sequential(make(), nn.ReLU(inplace=True))

    pool, norm = partial(nn.MaxPool2d, 3, 2), partial(nn.LocalResponseNorm, 5)
    recipe: Recipe = [
        partial(convolution, 3, 96, 11, stride=4), partial(nn.ReLU), pool, norm,
        partial(convolution, 96, 256, 5, groups=2), partial(nn.ReLU), pool, norm,
        partial(activated, partial(convolution, 256, 384, 3)),
        partial(activated, partial(convolution, 384, 384, 3, groups=2)),
        partial(activated, partial(convolution, 384, 256, 3, groups=2)),
        pool,
        partial(_flat, 256 * 6 * 6, 4096),
        partial(activated, partial(nn.Linear, 4096, 4096)),
        partial(nn.Linear, 4096, classes),
    ]  # fmt: skip
    return recipe


def _flat(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs), nn.ReLU(inplace=True))
