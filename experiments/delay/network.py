"""Residual MLPs of twenty stages, several of them side by side in the same tensors.

Steps of one example are all overhead: a dozen networks beside each other train in the time of one. They stay as
independent as in runs of their own, since the optimizers and the cures of this study look at each weight alone;
`main.py --check` holds them against such runs.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

STAGES, WIDTH, PIXELS, CLASSES = 20, 32, 64, 10


class Linear(nn.Module):
    """`nn.Linear` with its initial weights for each of K networks: [K, examples, ins] to [K, examples, outs].

    Network k's weights are scales[k] times the parameters, which trains it at scales[k]^2 times the learning rate of
    SGD, scales[k] times that of Adam: networks of several rates stand side by side, too.
    """

    def __init__(self, ins: int, outs: int, draws: Sequence[torch.Generator], scales: Tensor) -> None:
        super().__init__()
        self.scales = scales.view(-1, 1, 1)
        bound = 1 / math.sqrt(ins)
        self.weight = nn.Parameter(uniform(bound, (ins, outs), draws, scales.dtype) / self.scales)
        self.bias = nn.Parameter(uniform(bound, (1, outs), draws, scales.dtype) / self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """What each network makes of its own examples."""
        return torch.baddbmm(self.bias, x, self.weight) * self.scales


class Block(nn.Module):
    """x + Linear(relu(x))."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[K, examples, width] to the same."""
        return x + self.linear(torch.relu(x))


def uniform(bound: float, shape: tuple[int, int], draws: Sequence[torch.Generator], dtype: torch.dtype) -> Tensor:
    """[K, *shape]: each network's from its own generator, so that it starts the same whatever stands beside it."""
    return torch.stack([torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=draw) for draw in draws])


def stages(seeds: Sequence[int], scales: Sequence[float], dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """K networks, one for each seed and scale, in twenty stages: into the width, eighteen blocks, out of it."""
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]

    def linear(ins: int, outs: int) -> Linear:
        return Linear(ins, outs, draws, torch.tensor(scales, dtype=dtype))

    blocks = [Block(linear(WIDTH, WIDTH)) for _ in range(STAGES - 2)]
    return [linear(PIXELS, WIDTH), *blocks, nn.Sequential(nn.ReLU(), linear(WIDTH, CLASSES))]
