"""The next values of a noisy seasonal series, by a recurrent network with a loss and a metric of its own."""

import math

import torch
from torch import Tensor, nn

PAST, AHEAD = 48, 6


class Layer(nn.Module):
    """A GRU over the series; its output, without the state."""

    def __init__(self, size_in: int, size: int) -> None:
        super().__init__()
        self.gru = nn.GRU(size_in, size, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Series [N, T, size_in] to [N, T, size]."""
        return self.gru(x)[0]


class Last(nn.Module):
    """The values ahead from what the network says at the last time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Linear(size, AHEAD)

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, size] to [N, AHEAD]."""
        return self.values(x[:, -1])


def build(size: int = 24, layers: int = 3) -> list[nn.Module]:
    """A list of layers: a stage for each unless `--stages` says otherwise."""
    return [Layer(1, size), *(Layer(size, size) for _ in range(layers - 1)), Last(size)]


def series(length: int = 3000) -> Tensor:
    """A trend, a day, a week, and noise."""
    t = torch.arange(length, dtype=torch.float32)
    noise = torch.randn(length, generator=torch.Generator().manual_seed(0))
    return (t * 2 * math.pi / 24).sin() + 0.5 * (t * 2 * math.pi / 168).sin() + 0.1 * noise


def windows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Every stretch of PAST values [N, PAST, 1], and the AHEAD values behind it [N, AHEAD]."""
    cut = values.unfold(0, PAST + AHEAD, 1)
    return cut[:, :PAST, None].contiguous(), cut[:, PAST:].contiguous()


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split by time: what is predicted is never seen in training."""
    values = series()
    return windows(values[:2000]), windows(values[2000:2500]), windows(values[2500:])


def quantile(output: Tensor, target: Tensor) -> Tensor:
    """The pinball loss of the 70 % quantile: too low costs more than too high."""
    error = target - output
    return torch.maximum(0.7 * error, -0.3 * error).mean()


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error."""
    return (output - target).abs().mean()
