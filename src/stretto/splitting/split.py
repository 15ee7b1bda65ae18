"""A model into balanced stages."""

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.batch import several
from stretto.errors import UsageError, nearest
from stretto.splitting.blocks import Blocks
from stretto.splitting.cost import Inputs, measure
from stretto.splitting.layers import Layers
from stretto.splitting.lists import candidates, entries, lookup, main_list, whole_list, whole_tuples
from stretto.splitting.parts import Parts, parted
from stretto.splitting.recording import TraceError
from stretto.splitting.stages import Stages, explain
from stretto.splitting.undisturbed import home

LOGGER = logging.getLogger("stretto")
BY = ("flops", "time", "parameters")
TIED = ("apart", "together")


def split(
    model: nn.Module | Sequence[nn.Module],
    num_stages: int | Sequence[int],
    *,
    example: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor] | None = None,
    path: str | None = None,
    by: str = "flops",
    tied: str = "apart",
) -> Stages:
    """Cut a model into `num_stages` stages of about the same cost, which hold the model's own modules.

    Nothing is copied: on one process, training the stages trains the model. Run one after the other
    (`stretto.Trainer`, or `stretto.chain.Chain`) they compute exactly what the model does.

    Args:
        model: an nn.Sequential, an nn.ModuleList or a list of layers; or any module that calls a list of blocks, such
            as a Hugging Face model; or, with an example, any module that torch.export can follow.
        num_stages: at most as many as there are layers or blocks; or, instead of a balanced cut, where stages begin and
            the number of layers, [0, 2, 5], as `stretto plan` and `Stages.bounds` say it.
        example: one input batch, a tensor or a tuple of tensors. It shows what layers cost and give; without it the
            number of parameters counts, and what passes between blocks is taken to be tensors. A dict of tensors,
            {"input_ids": x, "attention_mask": m}, says which arguments of forward they fill; the stages, and
            `trainer.step`, take them in this order as a tuple.
        path: the dotted name of the model's list of blocks, "transformer.h"; may be left out where there is no doubt.
            The forward is traced (torch.fx) and cut between blocks; the first stage also holds what comes before them,
            the last one what comes after. What later stages need (masks, rotary tables) travels with the tuple that a
            stage returns. Arguments of forward beyond those that `example` gives take their defaults, but `use_cache`
            is False. Of a ModelOutput the last stage returns the tensors: one (logits), or a tuple.
            A model that has no one list of blocks, or cannot be cut between them into so many stages, is exported
            instead (torch.export, seconds) and its graph cut: stages about as even as can be, then the fewest bytes
            between them. It trains and evaluates as the model does, on any number of rows, but all other sizes, and
            the dtype, must be the example's; modules frozen in evaluation mode stay so.
        by: "flops", counted on the forward; "time", forward and backward, measured; or "parameters".
        tied: whether parts that share a parameter may come "apart", as pipelines can train them, or stay "together" in
            one stage, as methods need whose stages have losses of their own.

    The most expensive stage is as cheap as can be, then the sum of squares is least (of an exported graph: at most a
    tenth above that, then the bytes that travel are least). The result is a list; its
    `explanation` says what was chosen and why, and is logged on "stretto" (INFO); its `model_state` gives gathered
    weights the names that they have in the model. The model keeps its modes,
    statistics and gradients, and no random number is drawn.

    Raises UsageError where that cannot be done, with what to do instead.
    """
    check(model, num_stages, example, path, by, tied)
    num_wanted = num_stages if isinstance(num_stages, int) else len(num_stages) - 1
    parts, inputs, units = cuttable(model, example, path, tied, num_wanted)
    if isinstance(num_stages, int):
        check_enough(parts, len(units) - 1, num_stages)
    else:
        check_bounds(parts, units, num_stages)
    costs = measure(parts.cut(units), [parts.name(start, stop) for start, stop in pairwise(units)], inputs, by)
    if isinstance(num_stages, int):
        chosen = parts.choose(costs.values, units, num_stages)
    else:
        chosen = [units.index(bound) for bound in num_stages]
    bounds = [units[position] for position in chosen]
    kinds = [parts.kinds(start, stop) for start, stop in pairwise(bounds)]
    stages = parts.cut(bounds)
    parts.verify(stages)
    notes = [*parts.notes(bounds), *parted(stages)]
    explanation = explain(parts.noun, bounds, kinds, costs.together(chosen), notes)
    LOGGER.info("%s", explanation)
    return Stages(stages, model=model, bounds=bounds, explanation=explanation)


def pieces(
    model: nn.Module | Sequence[nn.Module],
    *,
    example: Tensor | tuple[Tensor, ...] | Mapping[str, Tensor] | None = None,
    path: str | None = None,
    tied: str = "apart",
) -> Stages:
    """As `split`, into as many stages as there can be: what stages are made of."""
    check(model, 1, example, path, BY[0], tied)
    parts, _, units = cuttable(model, example, path, tied, 2)
    return Stages(parts.cut(units), model=model, bounds=units, explanation=f"{len(units) - 1} pieces")


def cuttable(
    model: nn.Module | Sequence[nn.Module], example: Any, path: str | None, tied: str, num_wanted: int
) -> tuple[Parts, Inputs | None, list[int]]:
    """What a model is made of, the example where it is, and where it can be cut, both ends included."""
    names = list(example) if isinstance(example, Mapping) else None
    inputs = at_home(model, tuple(example.values()) if isinstance(example, Mapping) else example)
    parts = find(model, inputs, names, path, num_wanted, together=tied == "together")
    return parts, inputs, openings(parts)


def openings(parts: Parts) -> list[int]:
    """Where stages can begin, and the end."""
    return [0, *(i for i in range(1, len(parts)) if i not in parts.joints), len(parts)]


def find(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs | None,
    names: Sequence[str] | None,
    path: str | None,
    num_wanted: int,
    *,
    together: bool,
) -> Parts:
    """The layers of a list; or the blocks that a path names, or that there are; or pieces of an exported graph."""
    if path is not None:
        assert isinstance(model, nn.Module)
        return find_blocks(model, inputs, names, path, together=together)
    if not whole_list(model):
        return find_unnamed(model, inputs, names, num_wanted, together=together)
    if names is not None:
        raise UsageError(f"example names {', '.join(names)}, but a list of layers knows no names: give a tuple instead")
    layers = entries(model, "the list of layers")
    check_layers(layers, "the list of layers")
    return Layers(layers, inputs, whole=whole_tuples(model), together=together)


def find_blocks(
    model: nn.Module, inputs: Inputs | None, names: Sequence[str] | None, path: str, *, together: bool
) -> Blocks:
    """The blocks of the list that a path names."""
    blocks = {f"{path}.{name}": block for name, block in entries(lookup(model, path), repr(path))}
    check_layers(list(blocks.items()), repr(path))
    return Blocks(model, blocks, inputs, names, together=together)


def find_unnamed(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs | None,
    names: Sequence[str] | None,
    num_wanted: int,
    *,
    together: bool,
) -> Parts:
    """The blocks of the one list that may be meant; if they will not do, the model's graph, exported."""
    refusal = None
    if isinstance(model, nn.Module) and (path := main_list(model)) is not None:
        try:
            blocks = find_blocks(model, inputs, names, path, together=together)
        except TraceError as error:
            refusal = str(error)
        else:
            num_units = len(openings(blocks)) - 1
            if inputs is None or num_wanted <= num_units:
                return blocks
            refusal = shortage(blocks, num_units, num_wanted)
    if isinstance(model, nn.Module) and inputs is not None:
        return find_exported(model, inputs, names, refusal, together=together)
    raise UsageError(
        refusal
        or f"{type(model).__name__} is not an nn.Sequential, nn.ModuleList or list of layers: say where its list of "
        f"blocks is, path=...; {candidates(model)}. Or give one input batch, example=x, and its graph is cut wherever "
        "that can be done (torch.export)"
    )


def find_exported(
    model: nn.Module, inputs: Inputs, names: Sequence[str] | None, refusal: str | None, *, together: bool
) -> Parts:
    """The last resort; `refusal` says why the model's blocks would not do."""
    from stretto.splitting.exported import Exported  # torch.export takes its time

    because = f"{type(model).__name__} has no one list of blocks" if refusal is None else refusal.partition(". ")[0]
    try:
        return Exported(model, inputs, names, because, together=together)
    except UsageError as error:
        if refusal is None:
            raise
        raise UsageError(f"{refusal}. Nor can its graph be cut: {error}") from error


def check(model: object, num_stages: int | Sequence[int], example: object, path: object, by: str, tied: str) -> None:
    """Refuse what no model could make good."""
    whole = isinstance(num_stages, int) and num_stages >= 1
    if not whole and not (isinstance(num_stages, Sequence) and all(isinstance(each, int) for each in num_stages)):
        raise UsageError(f"num_stages={num_stages!r}: ask for at least one stage, or say where they begin: [0, 2, 5]")
    if by not in BY:
        raise UsageError(f"by={by!r}: {nearest(str(by), BY)}")
    if tied not in TIED:
        raise UsageError(f"tied={tied!r}: {nearest(str(tied), TIED)}")
    tensors = tuple(example.values()) if isinstance(example, Mapping) else several(example)
    if example is not None and (not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors)):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
        raise UsageError(f"example is ({kinds}): give one input batch, a tensor, or a tuple or dict of tensors")
    if by == "time" and example is None:
        raise UsageError("by='time' measures the layers on one input batch: give example=x, or by='parameters'")
    if path is not None and (not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList)):
        raise UsageError(f"path={path!r} is given, but a {type(model).__name__} has no forward: leave the path out")


def check_enough(parts: Parts, num_units: int, num_stages: int) -> None:
    """Refuse more stages than there are pieces to put into them."""
    if num_stages > num_units:
        raise UsageError(shortage(parts, num_units, num_stages))


def shortage(parts: Parts, num_units: int, num_stages: int) -> str:
    """Why so many stages cannot be made of these parts."""
    have = f"{num_stages} stages from {len(parts)} {parts.noun}s"
    if num_stages > len(parts):
        return (
            f"{have}: a stage holds at least one {parts.noun}. Ask for at most {num_units} stages, or give smaller "
            f"{parts.noun}s (a list of the layers within them)"
        )
    joints = dict.fromkeys(parts.joints.values())
    why = "; ".join(f"{joint.reason} ({joint.remedy})" for joint in list(joints)[:3])
    return (
        f"{have}, but only {num_units} {'piece' if num_units == 1 else 'pieces'} can be parted: {why}. Ask for at most "
        f"{num_units} {'stage' if num_units == 1 else 'stages'}, or part them as said"
    )


def check_bounds(parts: Parts, units: Sequence[int], bounds: Sequence[int]) -> None:
    """Refuse stages that begin where there is nothing, or where nothing can be parted."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(parts) or any(a >= b for a, b in pairwise(bounds)):
        raise UsageError(
            f"num_stages={list(bounds)}: stages begin at 0 and at larger and larger {parts.noun}s, and the last number "
            f"is that of the {parts.noun}s, {len(parts)}"
        )
    for bound in bounds:
        if bound not in units:
            joint = parts.joints[bound]
            raise UsageError(
                f"num_stages={list(bounds)}: no stage can begin at {bound}: {joint.reason}; {joint.remedy}"
            )


def check_layers(layers: Sequence[tuple[str, nn.Module]], what: str) -> None:
    """Refuse an empty list, and lazy layers: they are nothing until a batch has come through."""
    if not layers:
        raise UsageError(f"{what} is empty: there is nothing to split")
    for name, layer in layers:
        if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
            raise UsageError(
                f"layer {name} ({type(layer).__name__}) is lazy and has no shapes yet: call the model once on a batch "
                "before it is split"
            )


def at_home(model: nn.Module | Sequence[nn.Module], example: Tensor | tuple[Tensor, ...] | None) -> Inputs | None:
    """The example as a tuple, where the model is."""
    if example is None:
        return None
    roots = [model] if isinstance(model, nn.Module) else [root for root in model if isinstance(root, nn.Module)]
    device = home(roots)
    return tuple(tensor.to(device) for tensor in several(example))
