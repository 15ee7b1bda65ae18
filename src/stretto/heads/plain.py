"""Heads of one or two linear layers. They are ours."""

from torch import Tensor, nn

from stretto.heads.head import Site
from stretto.options.named import whole


class Mean(nn.Module):
    """The mean over positions: all dimensions after the channels, or the one before the features."""

    def __init__(self, *, channels_first: bool) -> None:
        super().__init__()
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, ...] or [N, T, C] to [N, C]."""
        return x.flatten(2).mean(2) if self.channels_first else x.mean(1)


def linear(at: Site) -> nn.Module:
    """[N, d] -> [N, K]."""
    return nn.Linear(at.shape[1], at.classes)


def pooled(at: Site) -> nn.Module:
    """[N, C, ...] -> [N, K]."""
    return nn.Sequential(Mean(channels_first=True), nn.Linear(at.shape[1], at.classes))


def sequence(at: Site) -> nn.Module:
    """[N, T, d] -> [N, K]."""
    width = at.shape[2]
    return nn.Sequential(Mean(channels_first=False), nn.LayerNorm(width), nn.Linear(width, at.classes))


def language(at: Site) -> nn.Module:
    """[N, T, d] -> [N, T, V]."""
    return nn.Sequential(nn.LayerNorm(at.shape[2]), nn.Linear(at.shape[2], at.classes, bias=False))


def two_layer(at: Site, *, width: int | None = None) -> nn.Module:
    """A plain head with a hidden layer of ReLUs, as wide as the features unless a `width` is given.

    Tensors [N, T, d] are words to a model that gives [N, T, V], and else images of one dimension, [N, C, length].
    """
    if width is not None:
        whole("head 'two-layer'", "width", width)
    words = at.output.dim() == 3
    given = at.shape[2] if words else at.shape[1]
    hidden = width or given
    first: list[nn.Module] = [nn.LayerNorm(given)] if words else []
    if not words and len(at.shape) > 2:
        first.append(Mean(channels_first=True))
    return nn.Sequential(*first, nn.Linear(given, hidden), nn.ReLU(), nn.Linear(hidden, at.classes, bias=not words))


def layered(features: int, output: int) -> bool:
    """Whether two layers lead there: to classes from anything, to words from words."""
    return (output == 2 and features >= 2) or (output == 3 and features == 3)
