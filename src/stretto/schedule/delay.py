"""Delays, read off a schedule: never derived from a stage's index."""

from functools import cached_property

from stretto.errors import ScheduleError
from stretto.options.checks import flag, of_kind
from stretto.schedule.dataflow import Tie
from stretto.schedule.schedule import Schedule

BACKWARD = "BW"  # the kinds that use a forward's weights again for the weight gradient


class ActionPositions:
    """The positions of a stage's updates, and of its first action of each kind, in the stage's order."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.updates: list[int] = []
        self._first: dict[str, list[int | None]] = {}  # kind -> by micro-batch of a turn
        for position, (kind, _, offset) in enumerate(schedule.of_stage(stage)):
            first = self._first.setdefault(kind, [None] * schedule.per_turn)
            if first[offset % schedule.per_turn] is None:
                first[offset % schedule.per_turn] = position
            if kind == "U":
                self.updates.append(position)

    def first(self, kinds: str, microbatch: int) -> int | None:
        """The position of the first action of one of these kinds for a micro-batch of a turn, or None."""
        positions = (self._first[kind][microbatch] for kind in kinds if kind in self._first)
        return min((position for position in positions if position is not None), default=None)


class Delays:
    """How many updates old the weights of a micro-batch's forward are when its gradient is applied.

    Usually these are the updates of its stage between its forward and its backward. `buffered` (PipeDream-2BW): all
    micro-batches of a minibatch see the weights before the last minibatch's update, on every stage. The delay is then
    one update everywhere, and none for the first minibatch after a drain.

    In the fill and drain of a pipeline a micro-batch may see fewer updates than in the steady state: `at` is exact,
    `steady` and `mean` are the largest and the mean delay of the micro-batches once the pipeline is full.
    """

    def __init__(self, schedule: Schedule, *, buffered: bool = False) -> None:
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        flag("buffered", buffered)
        self.schedule = schedule
        self.buffered = buffered
        self._positions = tuple(ActionPositions(schedule, stage) for stage in range(schedule.num_stages))
        self._steady_from = tuple(self._first_steady(stage) for stage in range(schedule.num_stages))
        self._turn_delays = tuple(self._of_stage(stage) for stage in range(schedule.num_stages))
        self._cache: dict[tuple[str, int, int], int] = {}

    @cached_property
    def steady(self) -> tuple[int, ...]:
        """The steady-state delay of every stage, in updates. Where micro-batches differ, the largest."""
        return tuple(max(delays) for delays in self._turn_delays)

    @cached_property
    def mean(self) -> tuple[float, ...]:
        """The steady-state delay of every stage, in updates, on average over the micro-batches of an update."""
        return tuple(sum(delays) / len(delays) for delays in self._turn_delays)

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
        if microbatch > self._steady_from[stage]:
            microbatch = self._steady_from[stage] + microbatch % self.schedule.per_turn
        delay = self._cache.get((since, stage, microbatch))
        if delay is None:
            delay = self._cache[since, stage, microbatch] = self._between(stage, microbatch, since)
        return delay

    def version(self, stage: int, microbatch: int) -> int:
        """The number of updates since the last drain in the weights that a micro-batch's forward sees."""
        return microbatch // self.schedule.per_turn - self.at(stage, microbatch)

    def tie(self, owner: int, user: int, trains: bool = True) -> Tie:
        """The tie of two stages: for each micro-batch, which of the owner's versions the user sees."""
        per_turn, first = self.schedule.per_turn, self._steady_from[owner]
        return Tie(owner, user, tuple(per_turn * self.at(owner, first + i) + i + 1 for i in range(per_turn)), trains)

    def reading(self, owner: int, user: int, every: int = 1, *, trains: bool = False) -> Tie:
        """The tie of a stage that reads weights of a later stage, and `trains` them or not.

        These weights are one update older for each stage between the two. A micro-batch takes that many updates to get
        there, so neither stage waits; a gradient that goes up is there before the owner's own.
        """
        behind, per_turn = owner - user + 1 + self.steady[owner], self.schedule.per_turn
        newest = [(turn - behind + 1) // every * every for turn in range(every)]  # the turn after the newest update
        microbatches = range(every * per_turn)
        distances = tuple(m - (newest[m // per_turn] * per_turn - 1) for m in microbatches)
        return Tie(owner, user, distances, trains, len(microbatches))

    def _of_stage(self, stage: int, since: str = "F") -> tuple[int, ...]:
        start = self._steady_from[stage]
        return tuple(self._between(stage, start + m, since) for m in range(self.schedule.per_turn))

    def _first_steady(self, stage: int) -> int:
        # The first micro-batch with as many updates between its forward and its backward as all later ones.
        turns = 1 + max(-(a.microbatch // self.schedule.per_turn) for a in self.schedule.of_stage(stage))
        return turns * self.schedule.per_turn

    def _between(self, stage: int, microbatch: int, since: str) -> int:
        per_turn = self.schedule.per_turn
        if self.buffered and since == "F":
            return min(1, microbatch // per_turn)
        start = self._turn_and_position(stage, since, microbatch)
        end = self._turn_and_position(stage, BACKWARD, microbatch)
        updates = 0
        for position in self._positions[stage].updates:
            first_turn = -(self.schedule.of_stage(stage)[position].microbatch // per_turn)  # of this update
            first = max(first_turn, start[0] + (position <= start[1]))
            last = end[0] - (position >= end[1])
            updates += max(0, last - first + 1)
        return updates

    def _turn_and_position(self, stage: int, kinds: str, microbatch: int) -> tuple[int, int]:
        position = self._positions[stage].first(kinds, microbatch % self.schedule.per_turn)
        if position is None:
            raise ScheduleError(f"stage {stage}: no {' or '.join(kinds)} for micro-batch {microbatch} in the schedule")
        return (microbatch - self.schedule.of_stage(stage)[position].microbatch) // self.schedule.per_turn, position
