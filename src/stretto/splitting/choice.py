"""The ways to cut a model, and the one that makes even stages."""

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
from stretto.splitting.lists import whole_list, whole_tuples
from stretto.splitting.parts import SplitParts
from stretto.splitting.structure import check_bounds, find, find_exported, openings, shortage

LOGGER = logging.getLogger("stretto")
FAIR = 1.3  # up to so many times its fair share of the cost the largest stage is fair
GAIN = 1.05  # how many times smaller another way has to make it, if not fair


class Way(NamedTuple):
    """Makes the parts that a model is cut into; a `costly` one is not gone if no single unit is what is too large."""

    make: Callable[[], SplitParts]
    costly: bool = False


def ways(
    model: nn.Module | Sequence[nn.Module],
    inputs: Inputs | None,
    names: Sequence[str] | None,
    path: str | None,
    num_wanted: int,
    *,
    together: bool,
) -> Iterator[Way]:
    """The ways to cut a model, the plainest first.

    The layers of a list, or the blocks of the list that is meant; the layers within layers; the modules that the
    forward calls; operations (torch.export). If a path says what is meant, or no example what costs how much, only the
    first.
    """
    yield Way(partial(find, model, inputs, names, path, num_wanted, together=together))
    if path is not None or inputs is None:
        return
    listed = whole_list(model)
    if listed:
        yield Way(partial(find, model, inputs, names, path, num_wanted, together=together, opened=True))
    if isinstance(model, nn.Module) and (whole_tuples(model) or not listed):
        yield Way(partial(Modules, model, inputs, names, together=together), costly=listed)
        why = f"the modules of {type(model).__name__} make uneven stages"
        yield Way(partial(find_exported, model, inputs, names, why, together=together), costly=True)


@dataclass(frozen=True, eq=False)
class StageCut:
    """Parts in stages: stage s is the units chosen[s] up to chosen[s + 1]; `costs` has one entry a unit."""

    parts: SplitParts
    units: Sequence[int]
    costs: PieceCosts
    chosen: Sequence[int]

    @property
    def bounds(self) -> list[int]:
        """Where stages begin, in parts, and the end."""
        return [self.units[position] for position in self.chosen]

    @cached_property
    def shares(self) -> list[float]:
        """Each stage's share of the cost."""
        each = self.costs.together(self.chosen).values
        return [cost / sum(each) for cost in each]

    @property
    def imbalance(self) -> float:
        """How many times its fair share the largest stage has."""
        return max(self.shares) * len(self.shares)

    @property
    def too_large(self) -> list[int]:
        """The units that alone have more than a fair share."""
        limit = FAIR * sum(self.costs.values) / len(self.shares)
        return [index for index, cost in enumerate(self.costs.values) if cost > limit]

    @property
    def divisible(self) -> bool:
        """Whether one of those may be parted by a finer way."""
        return any(
            self.parts.divisible(part)
            for unit in self.too_large
            for part in range(self.units[unit], self.units[unit + 1])
        )

    def name(self, unit: int) -> str:
        """A unit, for messages."""
        return self.parts.name(self.units[unit], self.units[unit + 1])

    def into(self, num_stages: int) -> "StageCut":
        """The same units in so many stages, as even as can be."""
        return replace(self, chosen=self.parts.choose(self.costs.values, self.units, num_stages))

    def stages(self) -> list[nn.Module]:
        """The stages. Raises UsageError if they do not compute what the model does."""
        made = self.parts.cut(self.bounds)
        self.parts.verify(made)
        return made


def measured(parts: SplitParts, inputs: Inputs | None, by: str) -> StageCut:
    """Parts with what they cost, all in one stage."""
    units = openings(parts)
    called = [parts.name(start, stop) for start, stop in pairwise(units)]
    costs = measure(parts.cut(units), called, inputs, by)
    return StageCut(parts, units, costs, [0, len(units) - 1])


def placed(parts: SplitParts, inputs: Inputs | None, by: str, num_stages: int | Sequence[int]) -> StageCut:
    """Parts in so many stages, as even as can be, or in those that begin there. Raises UsageError if they cannot."""
    units = openings(parts)
    if not isinstance(num_stages, int):
        check_bounds(parts, units, num_stages)
        return replace(measured(parts, inputs, by), chosen=[units.index(bound) for bound in num_stages])
    if num_stages >= len(units):
        raise UsageError(shortage(parts, len(units) - 1, num_stages))
    return measured(parts, inputs, by).into(num_stages)


def most_even(
    found: Iterable[Way], inputs: Inputs | None, by: str, num_stages: int | Sequence[int]
) -> tuple[StageCut, list[nn.Module]]:
    """The plainest way that makes fair stages, else the one that makes the largest stage smallest; and its stages.

    So the bounds that a way was chosen with choose it again. Raises what the plainest raises, unless only the number of
    its parts is wrong and another's is not.
    """
    best: tuple[StageCut, list[nn.Module]] | None = None
    refusal: UsageError | None = None
    for number, way in enumerate(found):
        if way.costly and (isinstance(num_stages, int) if best is None else not best[0].divisible):
            continue
        try:
            parts = way.make()
        except UsageError as error:
            if not number:
                raise
            LOGGER.debug("another way to cut the model fails: %s", error)
            continue
        try:
            cut = placed(parts, inputs, by, num_stages)
            if best is None or cut.imbalance <= FAIR or cut.imbalance * GAIN < best[0].imbalance:
                best = cut, cut.stages()
        except UsageError as error:
            meant = not isinstance(num_stages, int) and list(num_stages[-1:]) == [len(parts)]
            refusal = error if refusal is None or meant else refusal
            LOGGER.debug("another way to cut the model fails: %s", error)
        if best is not None and best[0].imbalance <= FAIR:
            break
    if best is None:
        assert refusal is not None, "there is at least one way"
        raise refusal
    return best


def uneven(cut: StageCut, path: str | None) -> str:
    """What there is to say where stages are not fair, and what to do about it."""
    shares, count = cut.shares, len(cut.shares)
    largest = shares.index(max(shares))
    each = ", ".join(f"{share:.1%}" for share in shares)
    return (
        f"stage {largest} of {count} has {cut.imbalance:.2f} times its fair share of the cost (stages have {each}; "
        f"{cut.costs.how}), and a pipeline is as slow as its slowest stage. {remedy(cut, path)}"
    )


def remedy(cut: StageCut, path: str | None) -> str:
    """What makes stages fairer."""
    count, most = len(cut.shares), len(cut.units) - 1
    near = sorted(range(max(2, count - 4), min(most, count + 4) + 1), key=lambda other: abs(other - count))
    fair = next((other for other in near if cut.into(other).imbalance <= FAIR), None)
    ways = []
    if path is not None:
        ways.append(f"leave path={path!r} out, so that it may be cut elsewhere, too")
    if fair is not None:
        ways.append(f"ask for {fair} stages, the largest of which has {cut.into(fair).imbalance:.2f} times its share")
    alone = f"{cut.name(cut.too_large[0])} alone is too large: " if cut.too_large else ""
    if cut.divisible:
        ways.append("make it of smaller modules, called one after the other")
    if not ways:
        ways.append("ask for fewer stages, or make it smaller" if alone else "ask for fewer stages")
    text = alone + "; or ".join(ways)
    return text[0].upper() + text[1:]
