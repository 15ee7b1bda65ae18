"""A plain ReLU multi-layer perceptron."""

from functools import partial
from typing import Literal

from torch import nn

from stretto.data import Dataset
from stretto.models.model import Recipe


def mlp(dataset: Dataset, *, depth: int = 8, width: int = 128) -> Recipe:
    """`depth` blocks of Linear and ReLU, [N, ...] -> [N, width] -> ... -> [N, classes].

    The first block also flattens its input, the last one also holds the output Linear.
    """
    inputs = dataset.train.x[0].numel()
    return [
        partial(
            _block,
            inputs=inputs if i == 0 else width,
            width=width,
            flatten=i == 0,
            classes=dataset.num_classes if i == depth - 1 else None,
        )
        for i in range(depth)
    ]


def _block(*, inputs: int, width: int, flatten: bool, classes: int | None) -> nn.Module:
    parts: list[nn.Module] = [nn.Flatten()] if flatten else []
    parts += [_linear(inputs, width, "relu"), nn.ReLU()]
    if classes is not None:
        parts.append(_linear(width, classes, "linear"))
    return nn.Sequential(*parts)


def _linear(inputs: int, outputs: int, nonlinearity: Literal["relu", "linear"]) -> nn.Linear:
    """A Linear whose weights keep the variance of the signal through any number of ReLU layers.

    With torch's default, which shrinks it in every layer, 8 layers learn nothing of digits in 8 epochs of SGD.
    """
    linear = nn.Linear(inputs, outputs)
    nn.init.kaiming_normal_(linear.weight, nonlinearity=nonlinearity)
    nn.init.zeros_(linear.bias)
    return linear
