"""Delays, read off a schedule: never derived from a stage's index."""

from functools import cached_property

from stretto.errors import ScheduleError
from stretto.options.checks import flag, of_kind
from stretto.schedule.rules import Tie
from stretto.schedule.schedule import Schedule

BACKWARD = "BW"  # the kinds that use a forward's weights again for the weight gradient


class ActionPositions:
    """Where the actions of a stage stand in its order."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.updates: list[int] = []
        self._first: dict[str, list[int | None]] = {}  # kind -> by micro-batch of a turn
        for position, (kind, _, offset) in enumerate(schedule.of_stage(stage)):
            of_kind = self._first.setdefault(kind, [None] * schedule.per_turn)
            if of_kind[offset % schedule.per_turn] is None:
                of_kind[offset % schedule.per_turn] = position
            if kind == "U":
                self.updates.append(position)

    def first(self, kinds: str, microbatch: int) -> int | None:
        """The first action of one of these kinds for a micro-batch of a turn; None where there is none."""
        places = (self._first[kind][microbatch] for kind in kinds if kind in self._first)
        return min((place for place in places if place is not None), default=None)


class Delays:
    """How many updates old the weights of a micro-batch's forward are when its gradient is applied.

    As a rule these are the updates of its stage between its forward and its backward. `buffered` says that all
    micro-batches of a minibatch see the version that the first of them could see on every stage, those before the
    last minibatch's update: then it is one update, everywhere (PipeDream-2BW), and none for the first minibatch after
    a drain.

    In the fill and drain of a pipeline a micro-batch may see fewer updates than in the steady state: `at` is exact,
    `steady` and `mean` are the largest and the mean delay of the micro-batches once the pipeline is full.
    """

    def __init__(self, schedule: Schedule, *, buffered: bool = False) -> None:
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        flag("buffered", buffered)
        self.schedule = schedule
        self.buffered = buffered
        self._places = tuple(ActionPositions(schedule, stage) for stage in range(schedule.num_stages))
        self._full = tuple(self._reach_back(stage) for stage in range(schedule.num_stages))
        self._of_turn = tuple(self._of_stage(stage) for stage in range(schedule.num_stages))
        self._known: dict[tuple[str, int, int], int] = {}

    @cached_property
    def steady(self) -> tuple[int, ...]:
        """The steady-state delay of every stage, in updates. Where micro-batches differ, the largest."""
        return tuple(max(delays) for delays in self._of_turn)

    @cached_property
    def mean(self) -> tuple[float, ...]:
        """The steady-state delay of every stage, in updates, on average over the micro-batches of an update."""
        return tuple(sum(delays) / len(delays) for delays in self._of_turn)

    @cached_property
    def recompute(self) -> tuple[float | None, ...]:
        """The updates of every stage between a micro-batch's recompute and its backward, on average over the
        micro-batches of an update; None where there is no recompute.
        """
        recomputing = {action.stage for actions in self.schedule.body for action in actions if action.kind == "C"}
        count = self.schedule.per_turn
        return tuple(
            sum(self._of_stage(s, "C")) / count if s in recomputing else None for s in range(self.schedule.num_stages)
        )

    def at(self, stage: int, microbatch: int) -> int:
        """The delay of one micro-batch while training goes on; fewer near the start, where updates are missing."""
        return self._at(stage, microbatch, "F")

    def recompute_at(self, stage: int, microbatch: int) -> int:
        """As `at`, from the recompute of one micro-batch to its backward."""
        return self._at(stage, microbatch, "C")

    def _at(self, stage: int, microbatch: int, since: str) -> int:
        if microbatch > self._full[stage]:
            microbatch = self._full[stage] + microbatch % self.schedule.per_turn
        known = self._known.get((since, stage, microbatch))
        if known is None:
            known = self._known[since, stage, microbatch] = self._between(stage, microbatch, since)
        return known

    def version(self, stage: int, microbatch: int) -> int:
        """How many updates the weights have had that a micro-batch's forward sees, counted from the last drain."""
        return microbatch // self.schedule.per_turn - self.at(stage, microbatch)

    def tie(self, owner: int, user: int, trains: bool = True) -> Tie:
        """The tie of two stages: which of the owner's versions goes with which micro-batch."""
        per_turn, late = self.schedule.per_turn, self._full[owner]
        return Tie(owner, user, tuple(per_turn * self.at(owner, late + i) + i + 1 for i in range(per_turn)), trains)

    def reading(self, owner: int, user: int, every: int) -> Tie:
        """The tie of a stage that only reads weights of a later one.

        One update older for each stage between them: the time that a micro-batch takes from one to the other, so that
        nobody waits.
        """
        assert self.schedule.per_turn == 1, "local methods do not cut minibatches"
        behind = owner - user + 1 + self.steady[owner]
        newest = [(m - behind + 1) // every * every - 1 for m in range(every)]
        return Tie(owner, user, tuple(m - each for m, each in enumerate(newest)), trains=False, every=every)

    def _of_stage(self, stage: int, since: str = "F") -> tuple[int, ...]:
        start = self._full[stage]
        return tuple(self._between(stage, start + m, since) for m in range(self.schedule.per_turn))

    def _reach_back(self, stage: int) -> int:
        # From this micro-batch on every update between its forward and its backward has happened.
        turns = 1 + max(-(a.microbatch // self.schedule.per_turn) for a in self.schedule.of_stage(stage))
        return turns * self.schedule.per_turn

    def _between(self, stage: int, microbatch: int, since: str) -> int:
        per_turn = self.schedule.per_turn
        if self.buffered and since == "F":
            return min(1, microbatch // per_turn)
        start = self._when(stage, since, microbatch)
        end = self._when(stage, BACKWARD, microbatch)
        updates = 0
        for place in self._places[stage].updates:
            entered = -(self.schedule.of_stage(stage)[place].microbatch // per_turn)  # turn of its first micro-batch
            first = max(entered, start[0] + (place <= start[1]))
            last = end[0] - (place >= end[1])
            updates += max(0, last - first + 1)
        return updates

    def _when(self, stage: int, kinds: str, microbatch: int) -> tuple[int, int]:
        place = self._places[stage].first(kinds, microbatch % self.schedule.per_turn)
        if place is None:
            raise ScheduleError(f"stage {stage}: no {' or '.join(kinds)} for micro-batch {microbatch} in the schedule")
        return (microbatch - self.schedule.of_stage(stage)[place].microbatch) // self.schedule.per_turn, place
