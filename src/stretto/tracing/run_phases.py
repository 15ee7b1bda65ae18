"""The phases of a recorded pipeline: ramp, steady state and drain, read off the order of its actions.

In turn n a worker issues the actions of its body, each for a micro-batch that has entered. A *stretch* are the turns
between two drains (`flush`, a checkpoint, a change of the method's phase): in its first `schedule.drain` turns some
actions have no micro-batch yet. One turn more counts as ramp: under methods without a drain the workers above get their
first values in it, and in the first turn of a run torch and the caches warm up.

Where each minibatch is finished before the next one enters, each step has phases of its own, ramp-up and ramp-down in
figure 11 of Laskin, Metz et al. (2020); the first step is no steady turn there either.
"""

import itertools
import re
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from stretto.schedule import Action, Rules, Schedule
from stretto.tracing.recording import Recording, Span

RAMP, STEADY, DRAIN = "ramp", "steady", "drain"
ACTION_NAME = re.compile(r"(\d+)([A-Z])(\d+)")
EVERY_TURN = range(sys.maxsize)


class RunPhase(NamedTuple):
    """A part of a run, from `start` to `end` in ns, and the turns that enter in it (none while it drains).

    Where it is a part of one step, that step's turn.
    """

    name: str
    start: int
    end: int
    turns: range


class Stretch(NamedTuple):
    """The turns that enter between two drains, the steady ones among them, and their begin and end (ns).

    `whole` is false if earlier events of a recording were dropped, so that its first turns are not all there. Where
    every minibatch is finished before the next one enters, the phases are those of each step.
    """

    turns: range
    steady: range
    phases: tuple[RunPhase, ...]
    whole: bool

    @property
    def start(self) -> int:
        """The start of its first action."""
        return self.phases[0].start

    @property
    def end(self) -> int:
        """The end of its last action."""
        return self.phases[-1].end


def by_step(phases: Iterable[RunPhase], among: Collection[int]) -> dict[int, dict[str, float]]:
    """{step, from 1: {phase: seconds}} of the turns `among`, of phases each of which belongs to one step."""
    steps: dict[int, dict[str, float]] = {}
    for phase in phases:
        if phase.turns.start in among:
            steps.setdefault(phase.turns.stop, {})[phase.name] = (phase.end - phase.start) / 1e9
    return steps


class Share(NamedTuple):
    """What a phase takes of a step: mean seconds over steps, its mean share, the least and the most."""

    seconds: float
    mean: float
    least: float
    most: float


def shares_of(steps: Mapping[int, Mapping[str, float]]) -> dict[str, Share]:
    """{phase: its share}, over steps as `by_step` gives them; a step without a phase counts as 0 of it."""
    found = {}
    for name in (RAMP, STEADY, DRAIN) if steps else ():
        parts = [step.get(name, 0.0) / sum(step.values()) for step in steps.values()]
        seconds = fmean(step.get(name, 0.0) for step in steps.values())
        found[name] = Share(seconds, fmean(parts), min(parts), max(parts))
    return found


def tracks(
    recordings: Sequence[Recording], schedule: Schedule, rules: Rules, among: range = EVERY_TURN
) -> dict[str, list[RunPhase]]:
    """The phases of a run, for a track of their own in a trace."""
    return {"phases": [phase for each in stretches(recordings, schedule, rules, among) for phase in each.phases]}


class Issued(NamedTuple):
    """An action that a worker ran: the turn it was issued in, the turn its micro-batch entered in, times, kind."""

    turn: int
    entered: int
    start: int
    end: int
    kind: str


def action_of(span: Span) -> Action | None:
    """The action that a span is about; None for a span that is no computation."""
    return action_named(span.name) if span.lane == "compute" else None


def action_named(text: str) -> Action | None:
    """The action of this name, as 2F7; None for any other text."""
    name = ACTION_NAME.fullmatch(text)
    return None if name is None else Action(name[2], int(name[1]), int(name[3]))


def stretches(
    recordings: Sequence[Recording], schedule: Schedule, rules: Rules, among: range = EVERY_TURN
) -> list[Stretch]:
    """The stretches of a run, in order; only minibatches `among` follow the schedule. Recordings: one for each worker.

    Empty where a worker recorded no action of the schedule.
    """
    workers = [issued(recording, schedule, among) for recording in recordings]
    if not workers or not all(workers):
        return []
    first, last = (edge(action.entered for actions in workers for action in actions) for edge in (min, max))
    cuts = [first, *sorted(drained(workers, schedule)), last + 1]
    dropped = any(recording.dropped for recording in recordings)
    by_stretch: list[list[list[Issued]]] = [[[] for _ in workers] for _ in cuts[1:]]
    for worker, actions in enumerate(workers):
        for action in actions:
            by_stretch[bisect_right(cuts, action.entered) - 1][worker].append(action)
    found = [
        stretch(here, schedule, rules, range(cuts[at], cuts[at + 1]), whole=at > 0 or not dropped)
        for at, here in enumerate(by_stretch)
        if all(here)
    ]
    return [each for each in found if each.phases]


def issued(recording: Recording, schedule: Schedule, among: range) -> list[Issued]:
    """The actions of a worker in their order; what its schedule does not list is left out."""
    offsets = {
        (kind, stage, offset % schedule.per_turn): offset // schedule.per_turn
        for body in schedule.body
        for kind, stage, offset in body
    }
    actions = []
    for span in recording.spans:
        action = action_of(span)
        if action is None:
            continue
        entered, piece = divmod(action.microbatch, schedule.per_turn)
        offset = offsets.get((action.kind, action.stage, piece))
        if offset is not None and entered in among:
            actions.append(Issued(entered - offset, entered, span.start, span.end, action.kind))
    return actions


def drained(workers: Sequence[Sequence[Issued]], schedule: Schedule) -> set[int]:
    """The minibatches that began only after every worker had finished all earlier ones.

    None where the schedule finishes them first in any case, so that a drain makes no difference.
    """
    if not any(overtakes(schedule, worker) for worker in range(schedule.num_workers)):
        return set()
    return set.intersection(*(finished_before([action.entered for action in actions]) for actions in workers))


def finished_before(entered: Sequence[int]) -> set[int]:
    """The minibatches before which a worker with these actions, in their order, had finished all earlier ones."""
    newest = list(itertools.accumulate(entered, max))
    oldest = list(itertools.accumulate(reversed(entered), min))[::-1]
    pairs = zip(newest, oldest[1:], strict=False)
    return {turn for before, after in pairs if before < after for turn in range(before + 1, after + 1)}


def overtakes(schedule: Schedule, worker: int) -> bool:
    """Whether a worker runs an action of a minibatch before one of an earlier minibatch."""
    turns = [action.microbatch // schedule.per_turn for action in schedule.body[worker]]
    return any(
        turn > other + (place > at) for place, turn in enumerate(turns) for at, other in enumerate(turns) if place != at
    )


def filling(schedule: Schedule, worker: int) -> int:
    """The turns in which a worker has no micro-batch yet for some of its actions."""
    return max(-(action.microbatch // schedule.per_turn) for action in schedule.body[worker])


def drains_each_turn(schedule: Schedule, rules: Rules) -> bool:
    """Whether every minibatch is finished before the next one enters: as its last gradient ends at the first stage."""
    return not schedule.drain and rules.reach.stop(schedule.num_stages - 1) == 0


def stretch(
    workers: Sequence[Sequence[Issued]], schedule: Schedule, rules: Rules, turns: range, *, whole: bool
) -> Stretch:
    """A stretch of minibatches `turns`, from the actions of each worker.

    It is steady from the time at which every worker has begun its second full turn until the first one ends the last
    turn in which a minibatch enters. Workers fill at different turns: the last one has full turns from the start.
    """
    full = turns[schedule.drain + 1 :]
    if drains_each_turn(schedule, rules):
        waits = "RUM" if rules.reduces else ""  # for all stages: no work of a worker's own
        return Stretch(turns, full, tuple(phases_of_steps(workers, waits, whole=whole)), whole)
    start = min(action.start for actions in workers for action in actions)
    end = max(action.end for actions in workers for action in actions)
    entered = min(max((a.end for a in actions if a.turn < turns.stop), default=end) for actions in workers)
    begun = max(
        min((a.start for a in actions if a.turn > turns.start + filling(schedule, worker)), default=end)
        for worker, actions in enumerate(workers)
    )
    settled = min(begun, entered)
    parts = [RunPhase(RAMP, start, settled, turns[: schedule.drain + 1])] if whole or not full else []
    if settled < entered:
        parts.append(RunPhase(STEADY, settled, entered, full))
    if entered < end:
        parts.append(RunPhase(DRAIN, entered, end, turns[:0]))
    return Stretch(turns, full, tuple(parts), whole)


def phases_of_steps(workers: Sequence[Sequence[Issued]], waits: str, *, whole: bool) -> Iterator[RunPhase]:
    """Yield the phases of each step: ramp until every worker has begun, drain from when the first one has finished.

    Actions of the kinds in `waits` are no work that keeps a worker from having finished. Steps whose beginning was
    dropped from some recording have no phases, unless all were.
    """
    steps: dict[int, list[list[Issued]]] = {}
    for worker, actions in enumerate(workers):
        for action in actions:
            steps.setdefault(action.turn, [[] for _ in workers])[worker].append(action)
    there = [turn for turn in sorted(steps) if all(steps[turn])]
    there = there if whole else there[1:] or there
    starts = {turn: min(action.start for actions in steps[turn] for action in actions) for turn in there}
    for turn in there:
        start, end = starts[turn], max(action.end for actions in steps[turn] for action in actions)
        end = min(end, starts.get(turn + 1, end))
        finished = min(max((a.end for a in actions if a.kind not in waits), default=end) for actions in steps[turn])
        begun = min(max(min(action.start for action in actions) for actions in steps[turn]), finished)
        parts = (RAMP, start, begun), (STEADY, begun, finished), (DRAIN, finished, end)
        yield from (
            RunPhase(name, since, until, range(turn, turn + 1)) for name, since, until in parts if since < until
        )
