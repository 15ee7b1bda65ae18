"""Where stages begin: as told, or wherever a block of the model does."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from stretto.analysis.diagnosis.step import Step
from stretto.errors import UsageError, nearest


def beginnings(step: Step) -> list[str]:
    """The first parameters of stages but the first: those that were told, else those of the model's blocks."""
    names = list(step.parameters)
    if step.cut:
        return [first_parameter(step, place) for place in step.cut]
    blocks = block_names(step.model)
    found = []
    for block in blocks:
        inside = [name for name in names if name == block or name.startswith(block + ".")]
        if inside and names.index(inside[0]):
            found.append(inside[0])
    return list(dict.fromkeys(found))


def first_parameter(step: Step, place: str) -> str:
    """The first parameter of the module, or the parameter, of this name. Raises UsageError if there is none."""
    for name in step.parameters:
        if name == place or name.startswith(place + "."):
            return name
    modules = {name.rpartition(".")[0] for name in step.parameters}
    raise UsageError(f"diagnose: cut={place!r} is no module with parameters: {nearest(place, modules)}")


def block_names(model: nn.Module) -> list[str]:
    """The outermost lists' members and, around them, the other children that hold parameters."""

    def inside(module: nn.Module, path: str) -> list[str]:
        found = []
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if not any(True for _ in child.parameters()):
                continue
            lists = isinstance(child, nn.ModuleList | nn.Sequential) or any(
                isinstance(each, nn.ModuleList | nn.Sequential) for each in child.modules()
            )
            is_block = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and path)
            found += inside(child, here) if lists and not is_block else [here]
        return found

    return inside(model, "")


def groups(step: Step) -> list[Sequence[str]]:
    """The parameters of each stage, where the cut was told."""
    names = list(step.parameters)
    places = [names.index(first) for first in beginnings(step)] if step.cut else []
    edges = [0, *places, len(names)]
    return [names[start:end] for start, end in pairwise(edges)]
