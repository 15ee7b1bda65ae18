"""The phases of a recorded pipeline: ramp, steady state and drain, read off the order of its actions.

In turn n a worker issues the actions of its body, each for a micro-batch that has entered. A *stretch* are the turns
between two drains (`flush`, a checkpoint, a change of the method's phase): in its first `schedule.drain` turns some
actions have no micro-batch yet. One turn more counts as ramp: under methods without a drain the workers above get their
first values in it, and in the first turn of a run torch and the caches warm up.
"""

import itertools
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from stretto.schedule import Action, Schedule
from stretto.tracing.recording import Recording, Span

RAMP, STEADY, DRAIN = "ramp", "steady", "drain"
ACTION_NAME = re.compile(r"(\d+)([A-Z])(\d+)")
EVERY_TURN = range(sys.maxsize)


class RunPhase(NamedTuple):
    """A part of a run, from `start` to `end` in ns, and the turns that enter in it (none while it drains)."""

    name: str
    start: int
    end: int
    turns: range


class Stretch(NamedTuple):
    """The turns that enter between two drains, the steady ones among them, and their begin and end (ns).

    `whole` is false if earlier events of a recording were dropped, so that its first turns are not all there.
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


def tracks(recordings: Sequence[Recording], schedule: Schedule, among: range = EVERY_TURN) -> dict[str, list[RunPhase]]:
    """The phases of a run, for a track of their own in a trace."""
    return {"phases": [phase for stretch in stretches(recordings, schedule, among) for phase in stretch.phases]}


class Issued(NamedTuple):
    """An action that a worker ran: the turn it was issued in, the turn its micro-batch entered in, and its times."""

    turn: int
    entered: int
    start: int
    end: int


def action_of(span: Span) -> Action | None:
    """The action that a span is about; None for a span that is no computation."""
    return action_named(span.name) if span.lane == "compute" else None


def action_named(text: str) -> Action | None:
    """The action of this name, as 2F7; None for any other text."""
    name = ACTION_NAME.fullmatch(text)
    return None if name is None else Action(name[2], int(name[1]), int(name[3]))


def stretches(recordings: Sequence[Recording], schedule: Schedule, among: range = EVERY_TURN) -> list[Stretch]:
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
    return [
        stretch(here, schedule, range(cuts[at], cuts[at + 1]), whole=at > 0 or not dropped)
        for at, here in enumerate(by_stretch)
        if all(here)
    ]


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
            actions.append(Issued(entered - offset, entered, span.start, span.end))
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


def stretch(workers: Sequence[Sequence[Issued]], schedule: Schedule, turns: range, *, whole: bool) -> Stretch:
    """A stretch of minibatches `turns`, from the actions of each worker.

    It is steady from the time at which every worker has begun its second full turn until the first one ends the last
    turn in which a minibatch enters. Workers fill at different turns: the last one has full turns from the start.
    """
    start = min(action.start for actions in workers for action in actions)
    end = max(action.end for actions in workers for action in actions)
    full = turns[schedule.drain + 1 :]
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
