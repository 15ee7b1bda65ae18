"""The ways to cut a model, and the choice of the one that makes even stages."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from stretto.errors import UsageError
from stretto.splitting.cost import Inputs, PieceCosts, measure
from stretto.splitting.fx.modules import Modules
from stretto.splitting.layer_lists import whole_list, whole_tuples
from stretto.splitting.parts import SplitParts
from stretto.splitting.proof import Proof
from stretto.splitting.structure import Request, check_bounds, find, find_exported, shortage, stage_starts

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
