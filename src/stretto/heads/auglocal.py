"""AugLocal (Ma et al. 2024, arXiv 2402.17318): a head is a small network of layers like those that come after it.

Which layers, and how many, is the authors' rule, as their code has it (github.com/ChenxiangMA/AugLocal): so many of the
following ones, evenly spread, the last one among them, and fewer from stage to stage. Ours: a layer is a stage of this
network, and begins as a copy of that stage; the last one, which gives the model's output, is the classifier. Where a
copy is given another shape than its stage is, a layer of adapters comes before it.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import REMEDY, Site, Tensors, decline
from stretto.heads.plain import Mean
from stretto.nn.batch import several
from stretto.nn.remote_stage import RemoteStage
from stretto.options.named import whole


def auglocal(at: Site, *, depth: int = 2, coefficient: float = 0.5) -> nn.Module:
    """`depth` layers behind the first stage, going down by `coefficient` of the way to one.

    Both as in the authors' command for 16 local modules of ResNet-32 on CIFAR-10.
    """
    whole("head 'auglocal'", "depth", depth)
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient <= 1:
        raise UsageError(f"head 'auglocal': coefficient={coefficient!r} must be a number from 0 to 1")
    network = at.network
    assert network is not None, "the head is built of the network's stages"
    stages = network.stages
    layers = chosen(at.stage, len(stages), depth_at(at.stage, len(stages), depth, coefficient))
    if network.shared or any(isinstance(stages[layer], RemoteStage) for layer in layers):
        why = (
            "several processes share a stage's weights or images"
            if network.shared
            else "they are given as functions, and live in other processes: give them as modules"
        )
        raise UsageError(f"head 'auglocal' copies stages {layers}, but {why}. {REMEDY}")
    parts, given = list[nn.Module](), at.features
    for layer in layers:
        wanted = network.outputs[layer - 1]
        parts += [adapted(given, wanted, at.stage, layer), copy.deepcopy(stages[layer]).to(given[0].device)]
        given = network.outputs[layer]
    return Copies(parts)


def depth_at(stage: int, num_stages: int, depth: int, coefficient: float) -> int:
    """How many layers the head behind a stage has."""
    share = coefficient * decline(stage, num_stages)
    return max(1, round(depth * (1 - share) + share))


def chosen(stage: int, num_stages: int, depth: int) -> list[int]:
    """The stages that the head behind `stage` is made of; all that follow where there are no more than `depth`."""
    following = num_stages - 1 - stage
    if depth >= following:
        return list(range(stage + 1, num_stages))
    return [round(stage + following / depth * number) for number in range(1, depth + 1)]


class Copies(nn.Module):
    """Layers in a row; what is a tuple is handed on as arguments. The first copy may change its input in place."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *features: Tensor) -> Any:
        """The model's kind of output."""
        values: Any = tuple(tensor.clone() for tensor in features)
        for layer in self.layers:
            values = several(layer(*values))
        return values if len(values) > 1 else values[0]


class Adapters(nn.Module):
    """One adapter for each tensor."""

    def __init__(self, each: Sequence[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, *values: Tensor) -> Any:
        """Each tensor in the shape that is wanted."""
        made = tuple(adapter(value) for adapter, value in zip(self.each, values, strict=True))
        return made if len(made) > 1 else made[0]


def adapted(given: Tensors, wanted: Tensors, stage: int, layer: int) -> nn.Module:
    """What leads from what is there to what a stage takes. Raises UsageError where nothing does."""
    pairs = list(zip(given, wanted, strict=False)) if len(given) == len(wanted) else []
    found = [adapter(here.shape, there.shape) for here, there in pairs if here.dtype == there.dtype]
    adapters = [each for each in found if each is not None]
    if not pairs or len(adapters) < len(pairs):
        shapes = [" and ".join(str(list(each.shape)) for each in tensors) for tensors in (given, wanted)]
        raise UsageError(
            f"head 'auglocal' behind stage {stage} cannot lead {shapes[0]} into a copy of stage {layer}, which takes "
            f"{shapes[1]}: cut the model elsewhere, or take another head. {REMEDY}"
        )
    return Adapters(adapters)


def adapter(given: Sequence[int], wanted: Sequence[int]) -> nn.Module | None:
    """From [N, d], [N, T, d] or [N, C, H, W] to the same kind of other width and size, or from an image to [N, d].

    None where there is no way.
    """
    here, there = tuple(given[1:]), tuple(wanted[1:])
    if here == there:
        return nn.Identity()
    if len(here) == len(there) == 3:
        shrink: list[nn.Module] = [] if here[1:] == there[1:] else [nn.AdaptiveAvgPool2d(there[1:])]
        widen: list[nn.Module] = [] if here[0] == there[0] else [nn.Conv2d(here[0], there[0], 1, bias=False)]
        return nn.Sequential(*shrink, *widen)
    if len(there) == 1 and len(here) in (1, 3):
        pool: list[nn.Module] = [Mean(channels_first=True)] if len(here) == 3 else []
        return nn.Sequential(*pool, nn.Linear(here[0], there[0]))
    if len(here) == len(there) == 2 and here[0] == there[0]:
        return nn.Linear(here[1], there[1])
    return None
