"""Heads of one or two linear layers, our own choice. N examples, d features, T positions, C channels, K classes."""

from torch import Tensor, nn

from stretto.heads.head import Site
from stretto.options.named import whole


class Mean(nn.Module):
    """The mean over positions: over all dimensions after [N, C], or over T in [N, T, d]."""

    def __init__(self, *, channels_first: bool) -> None:
        super().__init__()
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, ...] -> [N, C] with `channels_first`, else [N, T, d] -> [N, d]."""
        return x.flatten(2).mean(2) if self.channels_first else x.mean(1)


def linear(at: Site) -> nn.Module:
    """A Linear, [N, d] -> [N, K]."""
    return nn.Linear(at.shape[1], at.classes)


def pooled(at: Site) -> nn.Module:
    """The mean over positions and a Linear, [N, C, ...] -> [N, K]."""
    return nn.Sequential(Mean(channels_first=True), nn.Linear(at.shape[1], at.classes))


def sequence(at: Site) -> nn.Module:
    """The mean over T, LayerNorm and a Linear, [N, T, d] -> [N, K]."""
    width = at.shape[2]
    return nn.Sequential(Mean(channels_first=False), nn.LayerNorm(width), nn.Linear(width, at.classes))


def language(at: Site) -> nn.Module:
    """LayerNorm and a Linear without bias, [N, T, d] -> [N, T, V]."""
    return nn.Sequential(nn.LayerNorm(at.shape[2]), nn.Linear(at.shape[2], at.classes, bias=False))


def two_layer(at: Site, *, width: int | None = None) -> nn.Module:
    """A plain head with a hidden layer and ReLU; the hidden layer is `width` wide, by default as the features.

    A stage's [N, T, d] are tokens if the model returns [N, T, V]; else they are one-dimensional images [N, C, length].
    """
    if width is not None:
        whole("head 'two-layer'", "width", width)
    tokens = at.output.dim() == 3
    features = at.shape[2] if tokens else at.shape[1]
    hidden = width or features
    first: list[nn.Module] = [nn.LayerNorm(features)] if tokens else []
    if not tokens and len(at.shape) > 2:
        first.append(Mean(channels_first=True))
    return nn.Sequential(*first, nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, at.classes, bias=not tokens))


def layered(features: int, output: int) -> bool:
    """Whether `two_layer` fits these numbers of dimensions: any features to [N, K], or [N, T, d] to [N, T, V]."""
    return (output == 2 and features >= 2) or (output == 3 and features == 3)
