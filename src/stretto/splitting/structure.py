"""Find the pieces of a model that stages can be made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError
from stretto.splitting.cost import Inputs
from stretto.splitting.fx.graph import TraceError
from stretto.splitting.fx.modules import Blocks
from stretto.splitting.layer_lists import Layers, candidates, entries, lookup, main_list, whole_list, whole_tuples
from stretto.splitting.parts import SplitParts


def stage_starts(parts: SplitParts) -> list[int]:
    """The pieces that a stage can begin with, and the number of pieces."""
    return [0, *(i for i in range(1, len(parts)) if i not in parts.joints), len(parts)]


@dataclass(frozen=True, eq=False)
class Request:
    """What is to be cut.

    A model; an input batch and the names of its tensors, if it has any; the path of the model's list of blocks, if it
    was given; how many stages must be possible; and whether parts that share a parameter stay `together`.
    """

    model: nn.Module | Sequence[nn.Module]
    inputs: Inputs | None
    names: Sequence[str] | None
    path: str | None
    num_wanted: int
    together: bool


def find(request: Request, *, opened: bool = False) -> SplitParts:
    """The pieces of a model: the layers of a list, the blocks of a list that its forward calls, or an exported graph.

    The graph is exported where too few stages are possible. With `opened`, a plain nn.Sequential among the layers of a
    list can be cut inside.
    """
    model = request.model
    if request.path is not None:
        return find_blocks(request, request.path)
    if not whole_list(model):
        return find_main_list(request)
    if request.names is not None:
        refuse_names(request.names)
    layers = entries(model, "the list of layers")
    check_layers(layers, "the list of layers")
    sequence = model if isinstance(model, nn.Sequential) else None
    whole, together = whole_tuples(model), request.together
    return Layers(layers, request.inputs, sequence=sequence, whole=whole, together=together, opened=opened)


def refuse_names(names: Iterable[str]) -> NoReturn:
    """Refuse an input batch as a dict where the model is a list of layers."""
    raise UsageError(f"example names {', '.join(names)}, but a list of layers knows no names: give a tuple instead")


def find_blocks(request: Request, path: str) -> Blocks:
    assert isinstance(request.model, nn.Module)
    blocks = {f"{path}.{name}": block for name, block in entries(lookup(request.model, path), repr(path))}
    check_layers(list(blocks.items()), repr(path))
    return Blocks(request.model, blocks, request.inputs, request.names, together=request.together)


def find_main_list(request: Request) -> SplitParts:
    """The blocks of the model's main list; if they make too few stages or cannot be traced, the exported graph."""
    model, refusal = request.model, None
    if isinstance(model, nn.Module) and (path := main_list(model)) is not None:
        try:
            blocks = find_blocks(request, path)
        except TraceError as error:
            refusal = str(error)
        else:
            num_units = len(stage_starts(blocks)) - 1
            if request.inputs is None or request.num_wanted <= num_units:
                return blocks
            refusal = shortage(blocks, num_units, request.num_wanted)
    if isinstance(model, nn.Module) and request.inputs is not None:
        return find_exported(request, refusal)
    raise UsageError(
        refusal
        or f"{type(model).__name__} is not an nn.Sequential, nn.ModuleList or list of layers: say where its list of "
        f"blocks is, path=...; {candidates(model)}. Or give one input batch, example=x, and its graph is cut wherever "
        "that can be done (torch.export)"
    )


def find_exported(request: Request, refusal: str | None) -> SplitParts:
    """The exported graph; `refusal` says why the model cannot be cut between blocks, None if it has no list of them."""
    from stretto.splitting.export.exported import Exported  # importing torch.export is slow

    model, inputs = request.model, request.inputs
    assert isinstance(model, nn.Module)
    assert inputs is not None
    reason = f"{type(model).__name__} has no one list of blocks" if refusal is None else refusal.partition(". ")[0]
    try:
        return Exported(model, inputs, request.names, reason, together=request.together)
    except UsageError as error:
        if refusal is None:
            raise
        raise UsageError(f"{refusal}. Nor can its graph be cut: {error}") from error


def shortage(parts: SplitParts, num_units: int, num_stages: int) -> str:
    """The message that `num_stages` stages are too many for these parts."""
    request = f"{num_stages} stages from {len(parts)} {parts.noun}s"
    if num_stages > len(parts):
        return (
            f"{request}: a stage holds at least one {parts.noun}. Ask for at most {num_units} stages, or give smaller "
            f"{parts.noun}s (a list of the layers within them)"
        )
    joints = dict.fromkeys(parts.joints.values())
    reasons = "; ".join(f"{joint.reason} ({joint.remedy})" for joint in list(joints)[:3])
    return (
        f"{request}, but only {num_units} {'piece' if num_units == 1 else 'pieces'} can be separated: {reasons}. Ask "
        f"for at most {num_units} {'stage' if num_units == 1 else 'stages'}, or apply the remedies in parentheses"
    )


def check_layers(layers: Sequence[tuple[str, nn.Module]], what: str) -> None:
    """Raise UsageError for an empty list, and for lazy layers, which have no shapes before the first batch."""
    if not layers:
        raise UsageError(f"{what} is empty: there is nothing to split")
    for name, layer in layers:
        if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
            raise UsageError(
                f"layer {name} ({type(layer).__name__}) is lazy and has no shapes yet: call the model once on a batch "
                "before it is split"
            )


def check_bounds(parts: SplitParts, units: Sequence[int], bounds: Sequence[int]) -> None:
    """Raise UsageError for bounds that do not cover all pieces, or a stage that begins where no cut may fall."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(parts) or any(a >= b for a, b in pairwise(bounds)):
        raise UsageError(
            f"num_stages={list(bounds)}: give 0, the {parts.noun} that each further stage begins "
            f"with, in rising order, and the number of {parts.noun}s, {len(parts)}"
        )
    for bound in bounds:
        if bound not in units:
            joint = parts.joints[bound]
            raise UsageError(
                f"num_stages={list(bounds)}: no stage can begin at {bound}: {joint.reason}; {joint.remedy}"
            )
