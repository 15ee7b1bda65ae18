"""`Method`: a schedule, how far gradients travel, and which weights a pass sees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from stretto.errors import UsageError
from stretto.methods.cure import ANY_MOMENTUM, Cure, GradientPrediction, Place, StepCure, WeightCopies
from stretto.methods.planning import Planning
from stretto.options.checks import MOST_STAGES, flag, is_whole, of_fields, of_kind, one_of, sequence, shown, whole
from stretto.schedule import Delays, Reach, Rules, Schedule, check
from stretto.schedule.added_actions import Agreement, with_agreement, with_recompute, with_reduce
from stretto.schedule.library.one_f_one_b import one_f_one_b
from stretto.schedule.schedule import side_by_side


@dataclass(frozen=True)
class Phases:
    """Minibatches before `warmup` and those from `finish` on are synchronous: each one's update before the next enters.

    PipeMare's T3 is such a warm-up (Yang et al. 2021, arXiv 1910.05124). Between phases the pipeline drains. Cures
    change nothing in a synchronous phase, but go on to follow the weights, to know past updates when it ends.
    """

    warmup: int = 0
    finish: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("warmup", self.warmup), ("finish", 0 if self.finish is None else self.finish)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UsageError(f"{name}={value!r}: a number of minibatches, 0 or more")
        if self.finish is not None and self.finish < self.warmup:
            raise UsageError(
                f"finish={self.finish} comes before warmup={self.warmup} is over: nothing would be asynchronous; use a "
                "later finish, or a synchronous method such as 1f1b"
            )

    def synchronous(self, minibatch: int) -> bool:
        """Whether a minibatch, counted from 0, belongs to a synchronous phase."""
        return minibatch < self.warmup or (self.finish is not None and minibatch >= self.finish)

    def synchronous_among(self, minibatches: int) -> int:
        late = 0 if self.finish is None else max(0, minibatches - self.finish)
        return min(self.warmup, minibatches) + late

    def __bool__(self) -> bool:
        return self.warmup > 0 or self.finish is not None


Family = Literal["synchronous", "asynchronous", "local"]
Pairs = Sequence[tuple[int, int]]
Readings = Sequence[tuple[int, int, int]]  # (owner, reader, after how many updates)


class Advice(NamedTuple):
    """The word that stands for a method, "async(warmup=100)", the optimizer's name and the number of stages.

    `whole` says that methods which cut minibatches were left out, `why` what decided, in words.
    """

    asked: str
    optimizer: str
    stages: int
    whole: bool = False
    why: str = ""


def one_each(num_stages: int) -> int:
    return num_stages


def whole_network(num_stages: int) -> Reach:
    """One head at the top, whose gradient reaches every stage."""
    return Reach((*[None] * (num_stages - 1), num_stages - 1))


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, for any number of stages.

    `schedule(num_stages, num_workers)` says who does what in which order. A synchronous method finishes every minibatch
    before the next one enters; another may do so in some `phases`. `reach(num_stages)` says where heads stand and how
    far their gradients travel: one head at the top that trains all stages, unless it is given. `weights` names a policy
    of `stretto.weights`, `cure` what is done about delay. `combine` says whether several losses that train the same
    stage are summed or averaged. `head` names how auxiliary heads are built (`stretto.heads`), or, where the reach says
    that gradients are predicted, what predicts them; `prediction` says how that learns. `recompute` says that
    forwards are run again for their backward, in segments of so many stages, or (True) of as many as suit the schedule
    (`schedule/added_actions.py`). `workers(num_stages)` is the number of workers by default. `pipelines(num_stages)`:
    the stages of each pipeline, where no gradient passes from one to the next; empty for one of all stages.
    `head_weight` is a factor of the auxiliary heads' losses. `planning` is what `stretto plan` needs beside all this
    (`methods/planning.py`). `advice` is there where it was asked for as "async" or "local" (`methods/advice.py`).
    """

    name: str
    summary: str
    schedule: Callable[[int, int], Schedule]
    synchronous: bool
    reach: Callable[[int], Reach] = whole_network
    weights: Literal["current", "stash", "double-buffered", "live"] = "current"
    cure: Cure = field(default_factory=Cure)
    combine: Literal["sum", "mean"] = "sum"
    head: str = "auto"
    head_weight: float = 1.0
    prediction: GradientPrediction | None = None
    recompute: int | bool = False
    workers: Callable[[int], int] = one_each
    pipelines: Callable[[int], Sequence[range]] = lambda _: ()
    phases: Phases = field(default_factory=Phases)
    planning: Planning | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    advice: Advice | None = None

    def __post_init__(self) -> None:
        of_fields("Method: ", self)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{key}={self._written(key)}' for key in self.options)})"

    def _written(self, key: str) -> str:
        # So that the name can be parsed again.
        return repr(self.options[key]) if key in ("path", "digest") else str(self.options[key])

    @property
    def family(self) -> Family:
        """The kind of method, by its losses and the delay of its gradients.

        synchronous: plain training. asynchronous: one loss, stale gradients. local: losses for some stages each.
        """
        if self.synchronous:
            return "synchronous"
        return "asynchronous" if self.reach is whole_network else "local"

    def is_backprop(self, num_stages: int) -> bool:
        """Whether a local method has one loss for all of so many stages, as `overlapping` has on two."""
        return (
            self.family == "local" and self.weights == "current" and self.reach(num_stages) == whole_network(num_stages)
        )

    def lag(self, num_stages: int) -> int:
        """How many minibatches the loss that `Trainer.step` returns is behind; no worker runs further ahead."""
        whole("num_stages", num_stages, 1)
        return 0 if self.synchronous else 2 * num_stages

    def delays(self, schedule: Schedule) -> Delays:
        """The delays of the gradients on each stage of `schedule`."""
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        return Delays(schedule, buffered=self._buffered(schedule))

    def step_cures(self, schedule: Schedule) -> tuple[StepCure, ...]:
        """What its cure changes in each stage's step: feedback, rotation."""
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        if not self.cure.changes_step:
            return (StepCure(),) * schedule.num_stages
        delays = self.delays(schedule).mean
        mean = sum(delays) / len(delays)
        return tuple(
            self.cure.at(Place(stage, len(delays), delay, 0.0, mean_delay=mean)) for stage, delay in enumerate(delays)
        )

    def weight_copies(self, schedule: Schedule) -> tuple[WeightCopies, ...]:
        """What its predictions and corrections keep of each stage's weights, with a momentum like any other."""
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        if self.cure.forward is None and self.cure.backward is None:
            return (WeightCopies(),) * schedule.num_stages
        delays = self.delays(schedule).mean
        return tuple(
            self.cure.copies(Place(stage, len(delays), delay, ANY_MOMENTUM)) for stage, delay in enumerate(delays)
        )

    def versions(self, schedule: Schedule) -> tuple[int, ...]:
        """How many versions of its weights each stage holds in the steady state, the current one included."""
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        if self.weights == "stash":
            return tuple(delay + 1 for delay in self.delays(schedule).steady)
        return (2 if self._buffered(schedule) else 1,) * schedule.num_stages

    def _buffered(self, schedule: Schedule) -> bool:
        # A single stage never waits for another: its forwards can see the newest weights, as plain training does.
        return self.weights == "double-buffered" and schedule.num_stages > 1

    def synchronous_plan(
        self,
        num_stages: int,
        num_workers: int | None = None,
        *,
        reduce: bool = False,
        ties: Pairs = (),
        reads: Readings = (),
        agreement: Agreement | None = None,
    ) -> tuple[Schedule, Rules]:
        """The schedule of its synchronous phases: 1F1B on minibatches that are cut as the method cuts them."""
        flag("reduce", reduce)
        schedule, rules = self.plan(num_stages, num_workers)
        flushed = self._drained(schedule)
        if self.recompute:
            flushed = with_recompute(flushed, pipelines=self.pipelines(num_stages))
        return planned(Delays(flushed), rules.reach, reduce, ties, reads, agreement, self.synchronous)

    def plan(
        self,
        num_stages: int,
        num_workers: int | None = None,
        *,
        reduce: bool = False,
        ties: Pairs = (),
        reads: Readings = (),
        agreement: Agreement | None = None,
    ) -> tuple[Schedule, Rules]:
        """The schedule and its rules for so many stages, on the method's default number of workers if None.

        `reduce` makes the updates of a synchronous method wait for the norms of all stages' gradients. `ties` are pairs
        of stages: the second works on weights of the first. It trains them if the first is above it, or else if all its
        losses train the first, too.
        `reads` are (owner, reader, every): after each `every` updates of the owner the reader gets its weights and
        does not train them. `agreement` is what replicas of the pipeline do at each update
        (`schedule/added_actions.py`). Raises ScheduleError for a schedule that is not complete or can deadlock,
        UsageError where there is nothing to recompute.
        """
        flag("reduce", reduce)
        schedule = self._laid_out(num_stages, num_workers)
        if self.recompute:
            schedule = self._recomputing(schedule)
        reduce &= self.synchronous
        return planned(self.delays(schedule), self.reach(num_stages), reduce, ties, reads, agreement, self.synchronous)

    def _drained(self, schedule: Schedule) -> Schedule:
        """1F1B on the same workers, in each of its pipelines."""
        parts, per_turn = self.pipelines(schedule.num_stages), schedule.per_turn
        if not parts:
            return one_f_one_b(schedule.num_stages, schedule.num_workers, per_turn)
        homes = [sorted({schedule.worker_of[stage] for stage in part}) for part in parts]
        pieces = [one_f_one_b(len(part), len(home), per_turn) for part, home in zip(parts, homes, strict=True)]
        return side_by_side(pieces, [home[0] for home in homes])

    def homes(self, num_stages: int, num_workers: int | None = None) -> Mapping[int, int]:
        """The worker that each stage lives on."""
        return self._laid_out(num_stages, num_workers).worker_of

    def _laid_out(self, num_stages: int, num_workers: int | None) -> Schedule:
        whole("num_stages", num_stages, 1, MOST_STAGES)
        if num_workers is not None:
            whole("num_workers", num_workers, 1, MOST_STAGES)
        return self.schedule(num_stages, self.workers(num_stages) if num_workers is None else num_workers)

    def _recomputing(self, plain: Schedule) -> Schedule:
        size = None if self.recompute is True else self.recompute
        schedule = with_recompute(plain, size, self.pipelines(plain.num_stages))
        if schedule == plain and plain.num_stages > 1:
            raise UsageError(
                f"{self} on {plain.num_stages} stages and {plain.num_workers} workers: nothing to recompute, as every "
                "backward that could wait for it follows its forward at once; leave recompute= out, or use shorter "
                "segments or fewer workers"
            )
        return schedule


def planned(
    delays: Delays,
    reach: Reach,
    reduce: bool,
    ties: Pairs,
    reads: Readings,
    agreement: Agreement | None,
    synchronous: bool,
) -> tuple[Schedule, Rules]:
    """The schedule of `delays`, with R for `reduce` and A or M for `agreement`, and its rules; checked.

    Where the method is `synchronous` all stages that share a weight work on the same version of it.
    """
    check_ties("ties", ties, 2, delays.schedule.num_stages)
    check_ties("reads", reads, 3, delays.schedule.num_stages)
    if agreement is not None:
        one_of("agreement", agreement, get_args(Agreement))
    schedule = with_reduce(delays.schedule) if reduce else delays.schedule
    if agreement is not None:
        schedule = with_agreement(schedule, agreement)
    shared = (
        delays.tie(owner, user, owner > user or reach.trains_all_of(owner, user))
        if owner < user or synchronous
        else delays.reading(owner, user, trains=True)
        for owner, user in ties
    )
    read = (
        delays.tie(owner, user, trains=False) if synchronous and every == 1 else delays.reading(owner, user, every)
        for owner, user, every in reads
        if (owner, user) not in ties
    )
    all_ties = (*shared, *read)
    rules = Rules.of(schedule, reach, ties=all_ties)
    check(schedule, rules)
    return schedule, rules


def check_ties(name: str, given: Sequence[tuple[int, ...]], length: int, num_stages: int) -> None:
    """Raise UsageError unless each tuple has `length` whole numbers, of which the first two are different stages."""
    sequence(name, given, f"a list of tuples of {length} whole numbers")
    for numbers in given:
        if not isinstance(numbers, tuple | list) or len(numbers) != length or not all(map(is_whole, numbers)):
            raise UsageError(f"{name}: {shown(numbers)}: give {length} whole numbers")
        if numbers[0] == numbers[1] or not all(0 <= stage < num_stages for stage in numbers[:2]):
            raise UsageError(f"{name}: {shown(numbers)}: two different stages from 0 to {num_stages - 1} come first")
