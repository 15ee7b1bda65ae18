"""Split a model into balanced stages: the ways to cut it, and the choice of the one that makes even stages."""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError, nearest
from stretto.nn import deferred
from stretto.nn.batch import Named, as_tuple, call, inputs_of, inputs_on
from stretto.nn.preserve import device_of, undisturbed
from stretto.options.checks import mapping, of_kind, one_of, sequence
from stretto.splitting.cost import Inputs, PieceCosts, measure
from stretto.splitting.fx.modules import Modules
from stretto.splitting.layer_lists import whole_list, whole_tuples
from stretto.splitting.parts import SplitParts, tied_notes
from stretto.splitting.proof import Proof
from stretto.splitting.structure import Request, check_bounds, check_layers, find, find_exported, shortage, stage_starts

LOGGER = logging.getLogger("stretto")
FAIR = 1.3  # stages count as even up to this cost of the largest one, over the mean cost
GAIN = 1.05  # another way replaces the best one only if its largest stage is smaller by this factor


class Way(NamedTuple):
    """A way to cut a model: `make` gives its parts.

    A `costly` way is tried only where the best one so far has a single unit that is too large for a stage.
    """

    make: Callable[[], SplitParts]
    costly: bool = False


def ways(request: Request) -> Iterator[Way]:
    """The ways to cut a model, the plainest first.

    Between the layers of a list, or the blocks of the model's main list; between the layers within layers; between the
    modules that the forward calls; between operations (torch.export). With a path, or without an example to count costs
    on, only the first.
    """
    yield Way(partial(find, request))
    model, inputs = request.model, request.inputs
    if request.path is not None or inputs is None:
        return
    listed = whole_list(model)
    if listed:
        yield Way(partial(find, request, opened=True))
    if isinstance(model, nn.Module) and (whole_tuples(model) or not listed):
        yield Way(partial(Modules, model, inputs, request.names, together=request.together), costly=listed)
        yield Way(partial(find_exported, request, f"the modules of {type(model).__name__} make uneven stages"), True)


@dataclass(frozen=True, eq=False)
class StageCut:
    """Parts in stages: stage s holds the units chosen[s] up to chosen[s + 1].

    `units[u]` is the part that unit u begins with; `costs` has one entry a unit.
    """

    parts: SplitParts
    units: Sequence[int]
    costs: PieceCosts
    chosen: Sequence[int]

    @property
    def bounds(self) -> list[int]:
        """The part that each stage begins with, and the number of parts."""
        return [self.units[position] for position in self.chosen]

    @cached_property
    def shares(self) -> list[float]:
        stage_costs = self.costs.together(self.chosen).values
        return [cost / sum(stage_costs) for cost in stage_costs]

    @property
    def imbalance(self) -> float:
        """The cost of the largest stage over the mean cost of a stage."""
        return max(self.shares) * len(self.shares)

    @property
    def too_large(self) -> list[int]:
        """The units that alone cost more than an even stage may."""
        limit = FAIR * sum(self.costs.values) / len(self.shares)
        return [index for index, cost in enumerate(self.costs.values) if cost > limit]

    @property
    def divisible(self) -> bool:
        """Whether a finer way may cut one of the units that are too large."""
        return any(
            self.parts.divisible(part)
            for unit in self.too_large
            for part in range(self.units[unit], self.units[unit + 1])
        )

    def name(self, unit: int) -> str:
        return self.parts.name(self.units[unit], self.units[unit + 1])

    def into(self, num_stages: int) -> "StageCut":
        """The same units cut into `num_stages` stages, as even as possible."""
        return replace(self, chosen=self.parts.choose(self.costs.values, self.units, num_stages))

    def proved(self, inputs: Inputs | None) -> "ProvedCut":
        """The stages. Raises UsageError if they do not train as the model does."""
        stages = self.parts.cut(self.bounds)
        return ProvedCut(self, stages, self.parts.verify(stages, inputs))


class ProvedCut(NamedTuple):
    """A cut, its stages, and the proof that they train as the model does."""

    cut: StageCut
    stages: list[nn.Module]
    proof: Proof


def measured(parts: SplitParts, inputs: Inputs | None, by: str) -> StageCut:
    units = stage_starts(parts)
    unit_names = [parts.name(start, stop) for start, stop in pairwise(units)]
    costs = measure(parts.cut(units), unit_names, inputs, by)
    return StageCut(parts, units, costs, [0, len(units) - 1])


def placed(parts: SplitParts, inputs: Inputs | None, by: str, num_stages: int | Sequence[int]) -> StageCut:
    """The parts in `num_stages` stages, as even as possible, or cut at the bounds that `num_stages` lists.

    Raises UsageError if no stage can begin there, or if there are too few parts.
    """
    units = stage_starts(parts)
    if not isinstance(num_stages, int):
        check_bounds(parts, units, num_stages)
        return replace(measured(parts, inputs, by), chosen=[units.index(bound) for bound in num_stages])
    if num_stages >= len(units):
        raise UsageError(shortage(parts, len(units) - 1, num_stages))
    return measured(parts, inputs, by).into(num_stages)


def most_even(choices: Iterable[Way], inputs: Inputs | None, by: str, num_stages: int | Sequence[int]) -> ProvedCut:
    """The cut of the plainest way that makes even stages, else of the way with the least imbalance; proved.

    Given the bounds of an earlier result, it chooses the same way again. Raises UsageError if every way fails: the
    first way's error, or that of a way whose number of parts the given bounds end with.
    """
    best: ProvedCut | None = None
    refusal: UsageError | None = None
    for index, way in enumerate(choices):
        if way.costly and (isinstance(num_stages, int) if best is None else not best.cut.divisible):
            continue
        try:
            parts = way.make()
        except UsageError as error:
            if not index:
                raise
            LOGGER.debug("another way to cut the model fails: %s", error)
            continue
        try:
            cut = placed(parts, inputs, by, num_stages)
            if best is None or cut.imbalance <= FAIR or cut.imbalance * GAIN < best.cut.imbalance:
                best = cut.proved(inputs)
        except UsageError as error:
            bounds_match = not isinstance(num_stages, int) and list(num_stages[-1:]) == [len(parts)]
            refusal = error if refusal is None or bounds_match else refusal
            LOGGER.debug("another way to cut the model fails: %s", error)
        if best is not None and best.cut.imbalance <= FAIR:
            break
    if best is None:
        assert refusal is not None, "there is at least one way"
        raise refusal
    return best


def uneven(cut: StageCut, path: str | None) -> str:
    """The warning for uneven stages: each one's share of the cost, and a remedy."""
    shares, count = cut.shares, len(cut.shares)
    largest = shares.index(max(shares))
    listed = ", ".join(f"{share:.1%}" for share in shares)
    return (
        f"stage {largest} of {count} has {cut.imbalance:.2f} times its fair share of the cost (stages have {listed}; "
        f"{cut.costs.how}), and a pipeline is as slow as its slowest stage. {remedy(cut, path)}"
    )


def remedy(cut: StageCut, path: str | None) -> str:
    """How to get more even stages."""
    count, most = len(cut.shares), len(cut.units) - 1
    nearby_counts = sorted(range(max(2, count - 4), min(most, count + 4) + 1), key=lambda other: abs(other - count))
    even = next((other for other in nearby_counts if cut.into(other).imbalance <= FAIR), None)
    options = []
    if path is not None:
        options.append(f"leave path={path!r} out, so that it may be cut elsewhere, too")
    if even is not None:
        options.append(
            f"ask for {even} stages, the largest of which has {cut.into(even).imbalance:.2f} times its share"
        )
    culprit = f"{cut.name(cut.too_large[0])} alone is too large: " if cut.too_large else ""
    if cut.divisible:
        options.append("make it of smaller modules, called one after the other")
    if not options:
        options.append("ask for fewer stages, or make it smaller" if culprit else "ask for fewer stages")
    text = culprit + "; or ".join(options)
    return text[0].upper() + text[1:]


class Stages(list[nn.Module]):
    """A list of stages in order, as `stretto.Trainer` takes them.

    `explanation` is a text table: what each stage holds and costs, how the cost was obtained, and what had to stay
    together. `shares` are the stages' shares of that cost. `uneven` is a warning with a remedy if one stage is too
    large, else "". `exported` says whether they are cut from an exported graph, which takes inputs of the example's
    sizes only, but any number of rows. Stage s holds the layers `bounds[s]` up to `bounds[s + 1]`, or the blocks,
    modules or pieces of a graph if the model was cut between those.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        *,
        model: nn.Module | Sequence[nn.Module],
        bounds: Sequence[int],
        explanation: str,
        shares: Sequence[float],
        uneven: str = "",
        exported: bool = False,
    ) -> None:
        super().__init__(stages)
        self.bounds = list(bounds)
        self.explanation = explanation
        self.shares = list(shares)
        self.uneven = uneven
        self.exported = exported
        self._model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self._names = names_in(self._model, self)
        #: The mode of each module of the model when it was cut: whether it trains.
        self.modes = {module: module.training for module in self._model.modules()}

    @property
    def model(self) -> nn.Module:
        """The model that was cut; a list of layers as an nn.ModuleList."""
        return self._model

    def name_in_model(self, key: str) -> str | None:
        """The name in the model of a weight "<stage>.<name>"; None for one that an earlier stage has, too (tied)."""
        own = self._key(key)
        names = self._names[own]
        first = next(other for other, others in self._names.items() if others == names)
        return names[0] if names and first == own else None

    def first_name_in_model(self, key: str) -> str | None:
        """The first name in the model of a weight "<stage>.<name>", also of one that several stages have."""
        return next(iter(self._names[self._key(key)]), None)

    def model_state(self, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that `trainer.gather()` returned, under the names that `model.load_state_dict` takes.

        Heads are left out. Weights that no stage uses are the model's own. On one process the model itself is trained,
        and needs no state from here. Raises UsageError for weights of no stage.
        """
        mapping("gathered", gathered, "what trainer.gather() returned on rank 0: a dict of tensors by name")
        state: dict[str, Tensor] = dict(self._model.state_dict())
        for key, value in gathered.items():
            if not key.startswith("heads."):
                names = self._names[self._key(key)]
                of_kind(f"gathered[{key!r}]", value, Tensor, "a tensor")
                state.update(dict.fromkeys(names, value))
        return state

    def _key(self, weight: str) -> str:
        """The key in `_names` of a weight "<stage>.<name>" as a trainer names it."""
        key = weight.replace("_orig_mod.", "")  # torch.compile adds this prefix
        if key not in self._names:
            raise UsageError(f"{weight!r} is no weight of these {len(self)} stages: {nearest(key, self._names)}")
        return key


def names_in(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, list[str]]:
    """The names in the model of each weight "<stage>.<name>" of the stages; a tied weight has several."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return {
        f"{index}.{name}": names.get(id(value), [])
        for index, stage in enumerate(stages)
        for name, value in stage.state_dict(keep_vars=True).items()
    }


def explain(noun: str, bounds: Sequence[int], kinds: Sequence[str], costs: PieceCosts, notes: Sequence[str]) -> str:
    """The text of `Stages.explanation`: a table, a line on costs, and `notes`. `costs` holds one entry a stage."""
    total = sum(costs.values)
    rows = [("stage", f"{noun}s", "kinds", "cost", "share")]
    for index, (kind, cost) in enumerate(zip(kinds, costs.values, strict=True)):
        first, last = bounds[index], bounds[index + 1] - 1
        span = str(first) if first == last else f"{first}-{last}"
        rows.append((str(index), span, kind, costs.show(cost), f"{cost / total:.1%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(
            cell.rjust(width) if column > 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    imbalance = max(costs.values) * len(costs.values) / total
    return "\n".join([*table, f"cost: {costs.how}; imbalance {imbalance:.2f} (largest stage / mean)", *notes])


BY = ("flops", "time", "parameters")
TIED = ("apart", "together")
Example = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]


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
    (`stretto.Trainer`, or `stretto.nn.batch.Chain`) they compute exactly what the model does.

    Args:
        model: an nn.Sequential, an nn.ModuleList or a list of layers; or any module that calls a list of blocks, such
            as a Hugging Face model; or, with an example, any module that torch.export can follow.
        num_stages: at most as many as there are layers or blocks; or, instead of a balanced cut, where stages begin and
            the number of layers, [0, 2, 5], as `stretto plan` and `Stages.bounds` say it.
        example: one input batch, a tensor or a tuple of tensors. The layers' costs and outputs are taken from
            it; without it a layer's cost is its number of parameters, with a UserWarning where that says little, and
            values between blocks are assumed to be tensors. A dict of tensors, {"input_ids": x, "attention_mask": m},
            says which arguments of forward they fill; the stages, and `trainer.step`, take such a dict, or a tuple in
            this order.
        path: the dotted name of the model's list of blocks, "transformer.h"; may be left out where there is no doubt.
            The forward is traced (torch.fx) and cut between blocks; the first stage also holds the operations before
            them, the last one those after. Each stage returns a tuple with the values that later stages need (masks,
            rotary tables). Arguments of forward beyond those that `example` gives keep their defaults, but `use_cache`
            is False. Of a ModelOutput the last stage returns the tensors: one (logits), or a tuple.
            A model without a single list of blocks, or with too few blocks, is exported instead (torch.export, takes
            seconds) and its graph is cut: of all nearly even cuts, the one with the fewest bytes sent. It trains and
            evaluates as the model does, on any number of rows. All other sizes, and the dtype, must be the example's;
            modules frozen in evaluation mode stay so. One stage is the model itself where nothing can be recorded.
        by: "flops", counted on the forward; "time", forward and backward, measured; or "parameters".
        tied: whether parts that share a parameter may come "apart", or stay "together" in one stage. Apart, one of the
            stages trains it with the gradients of all: under pipelines the first; under methods whose stages have
            losses of their own (greedy) the last, and the others read a version that is some updates old. Untie a
            model before the cut for weights that go their own ways.

    The most expensive stage is as cheap as possible; ties go to the least sum of squared stage costs. (In an exported
    graph a stage may cost a tenth more than that, and the bytes sent between stages are least.) If a stage still costs
    more than 1.3 times the mean, and an example but no path is given, the model is cut elsewhere: between layers within
    layers, between the modules that its forward calls (torch.fx), or inside a module that is too large (torch.export).
    If that does not help either, a UserWarning gives the shares and a remedy.

    The result is a list. Its `shares` are the stages' shares of the cost; its `explanation` says how the model was cut
    and why, and is logged on "stretto" (INFO); its `model_state` gives gathered weights their names in the model. The
    model keeps its modes, statistics and gradients, and no random number is drawn.

    Raises UsageError, with a remedy, if the model cannot be split so.
    """
    stages = divide(model, num_stages, example=example, path=path, by=by, tied=tied)
    if stages.uneven:
        warnings.warn(stages.uneven, stacklevel=2)
    if example is None and by == "flops" and isinstance(num_stages, int) and num_stages > 1 and guesses(stages):
        warnings.warn(
            f"stages have {', '.join(f'{share:.1%}' for share in stages.shares)} of the parameters, and nobody knows "
            "what share of the cost, as there was no example. Give one input batch, "
            f"split(model, {num_stages}, example=x), or say by='parameters'",
            stacklevel=2,
        )
    return stages


def guesses(stages: Iterable[nn.Module]) -> bool:
    """Whether parameters say little of the cost: they do of Linear layers, and not of convolutions and embeddings."""
    parts = (part for stage in stages for part in stage.modules())
    return any(not isinstance(part, nn.Linear) and [*part.parameters(recurse=False)] for part in parts)


def divide(
    model: nn.Module | Sequence[nn.Module],
    num_stages: int | Sequence[int],
    *,
    example: Example | None = None,
    path: str | None = None,
    by: str = "flops",
    tied: str = "apart",
) -> Stages:
    """As `split`, without a warning: its text is in `uneven`."""
    check(model, num_stages, example, path, by, tied)
    if isinstance(model, nn.Module):
        leaves = [(name or "0", part) for name, part in model.named_modules() if not [*part.children()]]
        check_layers([*leaves, ("0", model)], "the model")
    request = request_for(
        model, example, path, num_stages if isinstance(num_stages, int) else len(num_stages) - 1, tied
    )
    try:
        cut, stages, proof = most_even(ways(request), request.inputs, by, num_stages)
    except UsageError:
        if num_stages == 1 and isinstance(model, nn.Module) and gives_tensors(model, example):
            return Stages([model], model=model, bounds=[0, 1], explanation="the whole model", shares=[1.0])
        raise
    is_uneven = isinstance(num_stages, int) and cut.imbalance > FAIR and cut.costs.known
    warning = uneven(cut, path) if is_uneven else ""
    explanation = explanation_of(cut, stages, proof)
    LOGGER.info("%s", explanation)
    LOGGER.info("the proof took %.3g s, %d forwards and as many backwards", proof.seconds, proof.steps)
    return Stages(
        stages,
        model=model,
        bounds=cut.bounds,
        explanation=explanation,
        shares=cut.shares,
        uneven=warning,
        exported=cut.parts.noun == "piece",
    )


def gives_tensors(model: nn.Module, example: Example | None) -> bool:
    """Whether a model is a stage as it is: it takes the example and returns a tensor, or a tuple of tensors."""
    if example is None or any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        return False
    device = device_of([model])
    with torch.no_grad(), undisturbed([model], device), deferred.faked([model]), suppress(Exception):
        output = call(model, inputs_on(example, device))
        return all(isinstance(tensor, Tensor) for tensor in as_tuple(output))
    return False


def pieces(
    model: nn.Module | Sequence[nn.Module],
    *,
    example: Example | None = None,
    path: str | None = None,
    tied: str = "apart",
) -> Stages:
    """As `split`, into as many stages as possible: the pieces that two stages would be made of."""
    check(model, 1, example, path, BY[0], tied)
    request = request_for(model, example, path, 2, tied)
    try:
        cut = most_even(ways(request), request.inputs, BY[0], 2).cut
    except UsageError:  # there is a single piece; any other mistake is raised again below
        cut = measured(find(request), request.inputs, BY[0])
    finest = cut.into(len(cut.units) - 1)
    return Stages(
        finest.parts.cut(finest.bounds),
        model=model,
        bounds=finest.bounds,
        explanation=f"{len(finest.shares)} pieces",
        shares=finest.shares,
    )


def request_for(
    model: nn.Module | Sequence[nn.Module], example: Example | None, path: str | None, num_wanted: int, tied: str
) -> Request:
    """The request, with the example's tensors on the model's device."""
    together = tied == "together"
    if example is None:
        return Request(model, None, None, path, num_wanted, together)
    tensors = inputs_of(example, "example")
    roots = [model] if isinstance(model, nn.Module) else [root for root in model if isinstance(root, nn.Module)]
    device = device_of(roots)
    names = list(tensors.names) if isinstance(tensors, Named) else None
    return Request(model, tuple(tensor.to(device) for tensor in tensors), names, path, num_wanted, together)


def explanation_of(cut: StageCut, stages: Sequence[nn.Module], proof: Proof) -> str:
    kinds = [cut.parts.kinds(start, stop) for start, stop in pairwise(cut.bounds)]
    notes = [*cut.parts.notes(cut.bounds), *tied_notes(stages), proof.text]
    return explain(cut.parts.noun, cut.bounds, kinds, cut.costs.together(cut.chosen), notes)


def check(model: object, num_stages: int | Sequence[int], example: object, path: object, by: str, tied: str) -> None:
    """Raise UsageError for arguments that are wrong for any model."""
    if not isinstance(model, nn.Module):
        sequence("model", model, "an nn.Module or a list of layers")
    whole = isinstance(num_stages, int) and num_stages >= 1
    if not whole and not (isinstance(num_stages, Sequence) and all(isinstance(bound, int) for bound in num_stages)):
        raise UsageError(f"num_stages={num_stages!r}: ask for at least one stage, or say where they begin: [0, 2, 5]")
    one_of("by", by, BY)
    one_of("tied", tied, TIED)
    if path is not None:
        of_kind("path", path, str, "the dotted name of the model's list of blocks, 'transformer.h'")
    if example is not None:
        inputs_of(example, "example")
    if by == "time" and example is None:
        raise UsageError("by='time' measures the layers on one input batch: give example=x, or by='parameters'")
    if path is not None and (not isinstance(model, nn.Module) or isinstance(model, nn.ModuleList)):
        raise UsageError(f"path={path!r} is given, but a {type(model).__name__} has no forward: leave the path out")
