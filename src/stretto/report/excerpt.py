"""Some turns of a recorded run, and the same turns simulated: what a timeline and an overlay show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.report.recorded_run import RecordedRun, turn_starts
from stretto.schedule import Action, Schedule
from stretto.tracing import Recording
from stretto.tracing.overlay import between
from stretto.tracing.run_phases import RunPhase, Stretch, stretches

if TYPE_CHECKING:
    from stretto.simulate import Network
    from stretto.simulate.network import Sizes

Durations = Callable[[Action], float]


@dataclass(frozen=True)
class Excerpt:
    """Recordings, a part of them from `start` to `end` ns, its phases, and when turns began there."""

    recordings: Sequence[Recording]
    start: int
    end: int
    phases: tuple[RunPhase, ...]
    starts: dict[int, int]  # of each turn on the first worker, ns

    @property
    def events(self) -> list[Recording]:
        """Copies of the recordings with what began in this part, the marks at its very end included."""
        return between(self.recordings, self.start, self.end + 1)

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return (self.end - self.start) / 1e9

    def in_phase(self, name: str) -> float:
        """The seconds that a phase takes; 0 without it."""
        return sum(phase.end - phase.start for phase in self.phases if phase.name == name) / 1e9

    def steps(self, turns: range) -> dict[int, float]:
        """{step, from 1: seconds to the start of the next one}; to the end of the excerpt after the last of its turns.

        The last step of a run has the drain in it.
        """
        ends = {turns.stop: self.end} | self.starts
        return {turn + 1: (ends[turn + 1] - ends[turn]) / 1e9 for turn in turns if {turn, turn + 1} <= ends.keys()}


def excerpts(
    recorded: RecordedRun, stretch: Stretch, turns: range, durations: Durations,
    *, network: "Network | None" = None, sizes: "Sizes | None" = None,
) -> tuple[Excerpt, Excerpt]:  # fmt: skip
    """Turns of a stretch as recorded, and as many simulated, under the same numbers.

    From the first turn of the stretch on both have the ramp, up to its last one the drain. Elsewhere the simulation
    has had twice the turns of a ramp before. `durations` gives the ns of an action by the number that it has in the
    recordings.
    """
    from stretto.simulate import simulate  # numpy takes a while
    from stretto.simulate.network import no_bytes
    from stretto.simulate.timeline import recordings as simulated_recordings

    schedule, full = recorded.schedule, recorded.schedule.drain + 1
    from_start, to_end = turns.start == stretch.turns.start, turns.stop == stretch.turns.stop
    before, after = (0 if from_start else 2 * full), (0 if to_end else full)
    later = (turns.start - before) * schedule.per_turn

    def shifted(action: Action) -> float:
        return durations(action._replace(microbatch=action.microbatch + later))

    timeline = simulate(
        schedule, recorded.rules, before + len(turns) + after, shifted, network=network, sizes=sizes or no_bytes
    )
    simulation = simulated_recordings(timeline, recorded.rules, unit=1)
    renumbered = between(simulation, 0, 2**63, later)
    (simulated,) = stretches(renumbered, schedule)
    ends = from_start, to_end
    return (
        excerpt(recorded.training, stretch, turns, schedule, ends),
        excerpt(renumbered, simulated, turns, schedule, ends),
    )


def excerpt(
    recordings: Sequence[Recording], stretch: Stretch, turns: range, schedule: Schedule, ends: tuple[bool, bool]
) -> Excerpt:
    """Turns of a stretch; `ends` say whether the ramp before and the drain after them belong to it."""
    starts = turn_starts(recordings[0], schedule)
    start = stretch.start if ends[0] else starts[turns.start]
    end = stretch.end if ends[1] else starts[turns.stop]
    inside = [
        phase._replace(start=max(phase.start, start), end=min(phase.end, end))
        for phase in stretch.phases
        if phase.start < end and phase.end > start
    ]
    here = {turn: time for turn, time in starts.items() if turn in stretch.turns}
    return Excerpt(recordings, start, end, tuple(inside), here)
