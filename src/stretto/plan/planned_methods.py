"""The methods that plans choose from: those of the table of methods, each with what it says of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import NamedTuple, get_args

from stretto.errors import UsageError, nearest
from stretto.methods import METHODS, Method, Planning, StageAt, method
from stretto.methods.definition import Family
from stretto.methods.table import FROM_FILES, PHASES
from stretto.options.parse import parse

FAMILIES: tuple[Family, ...] = get_args(Family)


class GradientFlow(NamedTuple):
    """Which stages have a loss beside the model's own, and which get a gradient from the one above them."""

    heads: frozenset[int]
    arrive: tuple[bool, ...]
    everywhere: bool  # whether every stage but the last one gets one


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMethod:
    """A method under the name that plans have for it: `base` with the `options` that are not for a plan to choose.

    `family`, `drains` (whether every minibatch is finished before the next one enters) and `optimizers` (those that it
    works with, any if there are none) repeat the method's, as a search asks for them very often.
    """

    base: str
    options: tuple[str, ...]
    method: Method
    planning: Planning
    family: Family
    drains: bool
    optimizers: tuple[str, ...]

    @classmethod
    def of(cls, chosen: Method, planning: Planning, *options: str) -> "PlannedMethod":
        """A method under some options."""
        return cls(
            base=chosen.name, options=options, method=chosen, planning=planning, family=chosen.family,
            drains=chosen.synchronous, optimizers=chosen.cure.optimizers,
        )  # fmt: skip

    def versions(self, at: StageAt) -> float:
        """How many versions of its weights a stage keeps."""
        if self.method.weights == "stash":
            return ceil(self.planning.delay(at)) + 1
        return 2 if self.method.weights == "double-buffered" and at.stages > 1 else 1

    def drives(self, optimizer: str) -> bool:
        """Whether the method works with an optimizer."""
        return not self.optimizers or optimizer in self.optimizers

    def suits(self, workers: int) -> bool:
        """Whether plans try the method on so many workers of a pipeline."""
        fewest, most = self.planning.workers
        return fewest <= workers and (most is None or workers <= most)

    def written(self, *chosen: str) -> str:
        """The method with options that a plan has chosen, as `stretto.method` reads it."""
        return with_options(self.base, [*chosen, *self.options])


def with_options(name: str, options: Sequence[str]) -> str:
    """A name and its options."""
    return f"{name}({', '.join(options)})" if options else name


@cache
def gradients(planned: PlannedMethod, workers: int, losses: int) -> GradientFlow:
    """How far gradients travel among the stages of so many workers; `losses` train a chunk of the stages each."""
    option, stages = planned.planning.losses, workers * planned.planning.stages_per_worker
    reach = method(planned.written(*([f"{option}={losses}"] if option else []))).reach(stages)
    arrive = tuple(bool(reach.arriving(stage)) for stage in range(stages))
    return GradientFlow(frozenset(reach.heads) - {stages - 1}, arrive, all(arrive[:-1]))


def catalogue() -> Mapping[str, PlannedMethod]:
    """Every method of the table that says how to plan it, in all its variants, by name; family by family."""
    return _catalogue(tuple(METHODS))


@cache
def _catalogue(names: tuple[str, ...]) -> Mapping[str, PlannedMethod]:
    found: dict[str, PlannedMethod] = {}
    for name in names:
        planning = method(name).planning
        for index, options in enumerate(planning.variants if planning else ()):
            text = with_options(name, [options] if options else [])
            chosen = method(text)
            assert chosen.planning is not None, "all variants of a method can be planned, or none"
            found[text if index else name] = PlannedMethod.of(chosen, chosen.planning, *([options] if options else []))
    return {name: each for family in FAMILIES for name, each in found.items() if each.family == family}


@cache
def planned(name: str) -> PlannedMethod:
    """The method that plans call `name`: one of the catalogue, or any other with options that plans leave alone.

    Raises UsageError for what is no method, and for a method that does not say how to plan it.
    """
    known = catalogue()
    if name in known:
        return known[name]
    bare, options = parse(name)
    if bare not in (*METHODS, *FROM_FILES) and ":" not in bare:
        raise UsageError(f"cannot plan for method {name!r}: {nearest(name, [*known, *FAMILIES, 'all'])}")
    chosen = method(name)
    planning = chosen.planning
    if planning is None:
        raise UsageError(
            f"cannot plan for method {name!r}: it does not say what plans have to know of it (planning= of its Method, "
            "see CONTRIBUTING.md); stretto simulate and stretto compare tell what it takes"
        )
    for key in options:
        if key in (planning.cut, planning.losses, "recompute", *PHASES):
            raise UsageError(f"cannot plan for method {name!r}: {key} is for the plan to choose; leave it out")
    twin = next((other for other, each in known.items() if str(each.method) == str(chosen)), None)
    if twin is not None:
        raise UsageError(f"cannot plan for method {name!r} by this name: plans call it {twin!r}")
    written = str(chosen).removeprefix(chosen.name)[1:-1]
    return PlannedMethod.of(chosen, planning, *([written] if written else []))


def names_of(words: Sequence[str]) -> tuple[str, ...]:
    """Names of methods from names, families and "all". Raises UsageError for what is neither."""
    found: list[str] = []
    for word in words:
        if word in (*FAMILIES, "all"):
            found += [name for name, each in catalogue().items() if word in (each.family, "all")]
        else:
            planned(word)
            found.append(word)
    return tuple(dict.fromkeys(found))
