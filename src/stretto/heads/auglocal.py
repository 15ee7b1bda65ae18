"""AugLocal (Ma et al. 2024, arXiv 2402.17318): a head is a small network of layers like the ones behind its stage.

The choice of layers follows the authors' code (github.com/ChenxiangMA/AugLocal): `depth` of the layers behind the
stage, evenly spread and including the last one; later stages get fewer. Ours: a layer is a stage of this network and
starts as a copy of that stage, and the copy of the last stage is the classifier. An adapter precedes a copy whose input
has another shape than its stage's.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import REMEDY, Site, Tensors, decline
from stretto.heads.plain import Mean
from stretto.nn import deferred
from stretto.nn.batch import as_tuple
from stretto.nn.deferred import RemoteStage
from stretto.options.named import whole


def auglocal(at: Site, *, depth: int = 2, coefficient: float = 0.5) -> nn.Module:
    """A head of `depth` layers behind stage 0; behind later stages fewer, falling by `coefficient` of the way to 1.

    The defaults are those of the authors' command for 16 local modules of ResNet-32 on CIFAR-10. Raises UsageError if a
    layer cannot be copied or adapted.
    """
    whole("head 'auglocal'", "depth", depth)
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient <= 1:
        raise UsageError(f"head 'auglocal': coefficient={coefficient!r} must be a number from 0 to 1")
    network = at.network
    assert network is not None, "the head is built from the network's stages"
    stages = network.stages
    layers = copied_stages(at.stage, len(stages), depth_at(at.stage, len(stages), depth, coefficient))
    if network.shared or any(isinstance(stages[layer], RemoteStage) for layer in layers):
        why = (
            "several processes share a stage's weights or images"
            if network.shared
            else "they are given as functions, and live in other processes: give them as modules"
        )
        raise UsageError(f"head 'auglocal' copies stages {layers}, but {why}. {REMEDY}")
    parts, features = list[nn.Module](), at.features
    for layer in layers:
        inputs = network.outputs[layer - 1]
        parts += [
            adapters_between(features, inputs, at.stage, layer),
            deferred.deep_copy(stages[layer]).to(features[0].device),
        ]
        features = network.outputs[layer]
    return Copies(parts)


def depth_at(stage: int, num_stages: int, depth: int, coefficient: float) -> int:
    """The number of layers of the head behind a stage, at least 1."""
    share = coefficient * decline(stage, num_stages)
    return max(1, round(depth * (1 - share) + share))


def copied_stages(stage: int, num_stages: int, depth: int) -> list[int]:
    """The stages that the head behind `stage` copies: `depth` later ones, or all of them if there are no more."""
    following = num_stages - 1 - stage
    if depth >= following:
        return list(range(stage + 1, num_stages))
    return [round(stage + following / depth * number) for number in range(1, depth + 1)]


class Copies(nn.Module):
    """Layers in a row; a tuple becomes the next one's arguments. Inputs are cloned: a copy may change them in place."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *features: Tensor) -> Any:
        values: Any = tuple(tensor.clone() for tensor in features)
        for layer in self.layers:
            values = as_tuple(layer(*values))
        return values if len(values) > 1 else values[0]


class Adapters(nn.Module):
    """One adapter for each tensor of a stage's input."""

    def __init__(self, adapters: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(adapters)

    def forward(self, *values: Tensor) -> Any:
        """Each tensor through its adapter; a tuple if there are several."""
        outputs = tuple(adapter(value) for adapter, value in zip(self.each, values, strict=True))
        return outputs if len(outputs) > 1 else outputs[0]


def adapters_between(
    features: Tensors, inputs: Tensors, stage: int, layer: int, *, head: str = "auglocal"
) -> nn.Module:
    """Adapters from `features`, behind `stage`, to the `inputs` of what the `head` has of stage `layer`.

    Raises UsageError if the numbers of tensors or their dtypes differ, or no adapter leads from one shape to the other.
    """
    pairs = list(zip(features, inputs, strict=False)) if len(features) == len(inputs) else []
    candidates = [adapter(source.shape, target.shape) for source, target in pairs if source.dtype == target.dtype]
    adapters = [module for module in candidates if module is not None]
    if not pairs or len(adapters) < len(pairs):
        shapes = [" and ".join(str(list(tensor.shape)) for tensor in tensors) for tensors in (features, inputs)]
        raise UsageError(
            f"head {head!r} behind stage {stage} cannot lead {shapes[0]} into its layers of stage {layer}, which take "
            f"{shapes[1]}: cut the model elsewhere, or take another head. {REMEDY}"
        )
    return Adapters(adapters)


def adapter(shape: Sequence[int], target_shape: Sequence[int]) -> nn.Module | None:
    """A module between two shapes of [N, d], [N, T, d] or [N, C, H, W], or from an image to [N, d].

    Images are pooled to the target's height and width and get its channels by a 1x1 convolution; other tensors get
    their width by a Linear. None for any other pair of shapes, and for different T.
    """
    source, target = tuple(shape[1:]), tuple(target_shape[1:])
    if source == target:
        return nn.Identity()
    if len(source) == len(target) == 3:
        shrink: list[nn.Module] = [] if source[1:] == target[1:] else [nn.AdaptiveAvgPool2d(target[1:])]
        widen: list[nn.Module] = [] if source[0] == target[0] else [nn.Conv2d(source[0], target[0], 1, bias=False)]
        return nn.Sequential(*shrink, *widen)
    if len(target) == 1 and len(source) in (1, 3):
        pool: list[nn.Module] = [Mean(channels_first=True)] if len(source) == 3 else []
        return nn.Sequential(*pool, nn.Linear(source[0], target[0]))
    if len(source) == len(target) == 2 and source[0] == target[0]:
        return nn.Linear(source[1], target[1])
    return None
