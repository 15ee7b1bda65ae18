"""The methods that plans choose from: the table of methods, each with its own closed forms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import NamedTuple, get_args

from stretto.cost.cure_costs import PLAIN
from stretto.errors import UsageError, nearest
from stretto.methods import METHODS, Method, Planning, StageAt, method
from stretto.methods.advice import FAMILY_OF
from stretto.methods.cure import ANY_MOMENTUM, Place, StepCure, WeightCopies, name_in_plans
from stretto.methods.definition import Family, whole_network
from stretto.methods.table import FROM_FILES, PHASES, is_advised
from stretto.options.named import parse
from stretto.schedule import Reach

FAMILIES: tuple[Family, ...] = get_args(Family)


class GradientFlow(NamedTuple):
    """The stages with a head of their own, and for each stage whether it receives a gradient from the stage above.

    `predicted` are the stages behind which a gradient is predicted.
    """

    heads: frozenset[int]
    predicted: frozenset[int]
    arrive: tuple[bool, ...]
    everywhere: bool  # whether every stage but the last receives one


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedMethod:
    """A method under its name in plans: `base` with the `options` that a plan does not choose.

    `family`, `drains` (whether every minibatch ends before the next one enters) and `optimizers` (the ones it works
    with; any if empty) repeat the method's, as a search reads them very often.
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
        """A method with options that a plan does not choose."""
        return cls(
            base=chosen.name,
            options=options,
            method=chosen,
            planning=planning,
            family=chosen.family,
            drains=chosen.synchronous,
            optimizers=chosen.cure.optimizers,
        )

    def versions(self, at: StageAt) -> float:
        """The number of versions of its weights that a stage keeps."""
        if self.method.weights == "stash":
            return ceil(self.planning.delay(at)) + 1
        return 2 if self.method.weights == "double-buffered" and at.stages > 1 else 1

    @property
    def head(self) -> str:
        """The name of the costs of what stands behind its stages: a head, or what predicts gradients there."""
        if self.method.prediction is None:
            return self.method.head
        return name_in_plans(self.method.head, labelled=self.method.reach(2).labelled)

    @property
    def has_heads(self) -> bool:
        """Whether there are heads behind stages, or what predicts gradients: all local methods have some."""
        return self.method.reach is not whole_network

    @property
    def predicts_gradients(self) -> bool:
        """Whether modules behind its stages predict gradients, and learn to, which only one process does."""
        return self.method.prediction is not None

    @property
    def turns_whole_matrices(self) -> bool:
        """Whether it needs all of each matrix in one process."""
        return self.method.cure.rotate is not None

    def step_cure(self, at: StageAt) -> StepCure:
        """What the method changes in the step of a stage."""
        return cure_at(self, at) if self.method.cure.changes_step else PLAIN

    def weight_copies(self, at: StageAt) -> WeightCopies:
        """What the method's predictions and corrections keep of a stage's weights."""
        cure = self.method.cure
        if cure.forward is None and cure.backward is None:
            return WeightCopies()
        return cure.copies(Place(at.stage, at.stages, self.planning.delay(at), ANY_MOMENTUM))

    def drives(self, optimizer: str) -> bool:
        """Whether the method works with an optimizer."""
        return not self.optimizers or optimizer in self.optimizers

    def planning_of(self, per_worker: int) -> Planning:
        """The closed forms with so many stages a worker; 0 is as many as the method has unless asked."""
        return self.planning if per_worker == 0 else with_stages(self.planning, per_worker)

    def suits(self, workers: int) -> bool:
        """Whether plans try the method on a pipeline of this many workers."""
        fewest, most = self.planning.workers
        return fewest <= workers and (most is None or workers <= most)

    def written(self, *chosen: str) -> str:
        """The method with the options that a plan chose, as `stretto.method` reads it."""
        return with_options(self.base, [*chosen, *self.options])


def with_options(name: str, options: Sequence[str]) -> str:
    """A name and its options: "gpipe(microbatches=4)"."""
    return f"{name}({', '.join(options)})" if options else name


@cache
def with_stages(planning: Planning, per_worker: int) -> Planning:
    """Closed forms with so many stages a worker."""
    return replace(planning, stages_per_worker=per_worker)


@cache
def cure_at(planned: PlannedMethod, at: StageAt) -> StepCure:
    """What a method changes in the step of a stage, by the closed forms of all stages' delays."""
    delays = [planned.planning.delay(at._replace(stage=stage)) for stage in range(at.stages)]
    mean = sum(delays) / len(delays)
    return planned.method.cure.at(Place(at.stage, at.stages, delays[at.stage], 0.0, mean_delay=mean))


@cache
def reach_of(planned: PlannedMethod, stages: int, losses: int) -> Reach:
    """Where gradients of a method go on `stages` stages; `losses` train a chunk of the stages each."""
    option = planned.planning.losses
    return method(planned.written(*([f"{option}={losses}"] if option else []))).reach(stages)


@cache
def gradients(planned: PlannedMethod, stages: int, losses: int) -> GradientFlow:
    """The gradient flow of a method on `stages` stages; `losses` train a chunk of the stages each."""
    reach = reach_of(planned, stages, losses)
    arrive = tuple(bool(reach.arriving(stage)) for stage in range(stages))
    return GradientFlow(frozenset(reach.heads) - {stages - 1}, reach.predicted, arrive, all(arrive[:-1]))


def catalogue() -> Mapping[str, PlannedMethod]:
    """Every method of the table that has closed forms, in all its variants, by name; family by family."""
    return _catalogue(tuple(METHODS))


@cache
def _catalogue(names: tuple[str, ...]) -> Mapping[str, PlannedMethod]:
    entries: dict[str, PlannedMethod] = {}
    for name in names:
        planning = method(name).planning
        for index, options in enumerate(planning.variants if planning else ()):
            title = with_options(name, [options] if options else [])
            chosen = method(title)
            assert chosen.planning is not None, "all variants of a method can be planned, or none"
            entries[title if index else name] = PlannedMethod.of(
                chosen, chosen.planning, *([options] if options else [])
            )
    return {name: entry for family in FAMILIES for name, entry in entries.items() if entry.family == family}


@cache
def planned(name: str) -> PlannedMethod:
    """The method with this name in plans: one of the catalogue, or another with options that plans do not choose.

    Raises UsageError for an unknown method, and for a method without closed forms.
    """
    known = catalogue()
    if name in known:
        return known[name]
    base, options = parse(name)
    if is_advised(name):
        raise UsageError(
            f"cannot plan for method {name!r}, which stands for another one, by the optimizer and the number of "
            f"stages: stretto plan --methods {name} does, or write {FAMILY_OF[base]!r} for all such methods"
        )
    if base not in (*METHODS, *FROM_FILES) and ":" not in base:
        raise UsageError(f"cannot plan for method {name!r}: {nearest(name, [*known, *FAMILIES, 'all'])}")
    chosen = method(name)
    planning = chosen.planning
    if planning is None:
        raise UsageError(
            f"cannot plan for method {name!r}: its Method has no closed forms (planning=..., see CONTRIBUTING.md). "
            "Add them, or predict it with stretto simulate or stretto compare"
        )
    for key in options:
        if key in (planning.cut, planning.losses, "recompute", *PHASES):
            raise UsageError(f"cannot plan for method {name!r}: {key} is for the plan to choose; leave it out")
    same = next((other for other, entry in known.items() if str(entry.method) == str(chosen)), None)
    if same is not None:
        raise UsageError(f"cannot plan for method {name!r} by this name: plans call it {same!r}")
    written = str(chosen).removeprefix(chosen.name)[1:-1]
    return PlannedMethod.of(chosen, planning, *([written] if written else []))


def as_planned(chosen: Method) -> str:
    """The name that plans have for a method: without what a plan chooses itself. Raises UsageError where there is none.

    Chunks of several stages that cut minibatches are pipelines, `chunked(inside=1f1b)`.
    """
    base, options = parse(str(chosen))
    planning = chosen.planning
    free = set() if planning is None else {planning.cut, planning.losses, "microbatches"}
    kept = {key: value for key, value in options.items() if key not in free}
    if base == "chunked" and "microbatches" in options:
        kept["inside"] = "1f1b"
    name = f"{base}({', '.join(f'{key}={value}' for key, value in kept.items())})" if kept else base
    planned(name)
    return name


def names_of(words: Sequence[str]) -> tuple[str, ...]:
    """The names of methods, with families and "all" expanded. Raises UsageError for an unknown name."""
    names: list[str] = []
    for word in words:
        if word in (*FAMILIES, "all"):
            names += [name for name, known in catalogue().items() if word in (known.family, "all")]
        else:
            planned(word)
            names.append(word)
    return tuple(dict.fromkeys(names))
