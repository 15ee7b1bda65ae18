"""Auxiliary heads: what turns a stage's output into the model's kind of output, so that a loss can stand there.

The layers of the paper's heads (Laskin, Metz et al. 2020) could not be retrieved; these are ours.

    linear      [N, d]            Linear                               -> [N, K]
    pooled      [N, C, ...]       mean over all positions, Linear      -> [N, K]
    sequence    [N, T, d]         mean over T, LayerNorm, Linear       -> [N, K]
    language    [N, T, d]         LayerNorm, Linear without bias       -> [N, T, V]
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest


class Mean(nn.Module):
    """The mean over positions: all dimensions after the channels, or the one before the features."""

    def __init__(self, *, channels_first: bool) -> None:
        super().__init__()
        self.channels_first = channels_first

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, ...] or [N, T, C] to [N, C]."""
        return x.flatten(2).mean(2) if self.channels_first else x.mean(1)


class First(nn.Module):
    """A head for a stage that returns several tensors: it reads the first."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """The head's output on the first tensor."""
        output: Tensor = self.head(x)
        return output


@dataclass(frozen=True)
class HeadKind:
    """How one kind of head is built, and which numbers of dimensions (the stage's, the model's) it goes between."""

    dims: Callable[[int, int], bool]
    build: Callable[[torch.Size, int], nn.Module]
    takes: str


HEADS: dict[str, HeadKind] = {
    "linear": HeadKind(lambda f, o: f == 2 and o == 2, lambda shape, k: nn.Linear(shape[1], k), "[N, d] -> [N, K]"),
    "pooled": HeadKind(
        lambda f, o: f >= 3 and o == 2,
        lambda shape, k: nn.Sequential(Mean(channels_first=True), nn.Linear(shape[1], k)),
        "[N, C, ...] -> [N, K]",
    ),
    "sequence": HeadKind(
        lambda f, o: f == 3 and o == 2,
        lambda shape, k: nn.Sequential(Mean(channels_first=False), nn.LayerNorm(shape[2]), nn.Linear(shape[2], k)),
        "[N, T, d] -> [N, K]",
    ),
    "language": HeadKind(
        lambda f, o: f == 3 and o == 3,
        lambda shape, k: nn.Sequential(nn.LayerNorm(shape[2]), nn.Linear(shape[2], k, bias=False)),
        "[N, T, d] -> [N, T, V]",
    ),
}


def build(name: str, stage: int, features: tuple[Tensor, ...], output: Tensor) -> nn.Module:
    """A head called `name` for a stage that gives `features`, in a model that gives `output` (both for one batch).

    "auto" chooses by the number of dimensions. Raises UsageError where no kind fits, or more than one.
    """
    if name != "auto" and name not in HEADS:
        raise UsageError(f"unknown head {name!r}: {nearest(name, [*HEADS, 'auto'])}")
    first = features[0]
    shapes = f"stage {stage} gives {list(first.shape)}, the model gives {list(output.shape)}"
    fitting = [kind for kind in HEADS.values() if kind.dims(first.dim(), output.dim())]
    if name != "auto":
        chosen = HEADS[name]
        if chosen not in fitting:
            raise UsageError(f"head {name!r} goes {chosen.takes}, but {shapes}; {_REMEDY}")
    elif len(fitting) == 1 and first.is_floating_point():
        chosen = fitting[0]
    else:
        names = " or ".join(f"head={key!r} ({kind.takes})" for key, kind in HEADS.items() if kind in fitting)
        why = f"say {names}" if fitting else "none of the built-in heads fits"
        raise UsageError(f"cannot choose a head: {shapes}; {why}. {_REMEDY}")
    head = chosen.build(first.shape, output.shape[-1])
    return head if len(features) == 1 else First(head)


_REMEDY = "You can give your own: heads=[module or None for each stage]"
