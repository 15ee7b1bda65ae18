"""The schedule of a method for given numbers of stages, workers and micro-batches, as show and simulate take it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.errors import UsageError

if TYPE_CHECKING:
    from stretto.methods import Method
    from stretto.schedule import Rules, Schedule
    from stretto.simulate import Durations

MOST_STAGES, MOST_MICROBATCHES, MOST_FORWARDS = 128, 1024, 8192  # more takes long to simulate
MICROBATCHES = 4  # unless the user or the method says how many


@dataclass(frozen=True)
class MethodLayout:
    """A method's schedule and rules, and how many turns of it enter before the pipeline drains."""

    method: "Method"
    schedule: "Schedule"
    rules: "Rules"
    turns: int

    @property
    def microbatches(self) -> int:
        """The number of micro-batches that enter before the pipeline drains."""
        return self.turns * self.schedule.per_turn

    def steady(self, times: "Durations", latency: float = 0) -> tuple[float, float]:
        """The time of a turn once the pipeline is full, and the share of it in which workers idle."""
        from stretto.simulate import period

        turn = period(self.schedule, self.rules, times, latency=latency)
        work = sum(times(action) for body in self.schedule.body for action in body)
        total = turn * self.schedule.num_workers
        return turn, max(0.0, (total - work) / total) if total else 0.0


def lay_out(method: str, stages: int, workers: int | None, microbatches: int | None) -> MethodLayout:
    """Lay out what a user asks for. Raises UsageError for counts that cannot be, or that take too long.

    `microbatches` is how many enter in all: those of one minibatch for a synchronous method that does not say itself
    how many its minibatch has; for any other method as many turns as they fill.
    """
    from stretto.methods import method as find
    from stretto.methods import with_microbatches

    for name, value, most in (("stages", stages, MOST_STAGES), ("microbatches", microbatches, MOST_MICROBATCHES)):
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{name}={value}: choose a whole number from 1 to {most}")
    if microbatches is not None and stages * microbatches > MOST_FORWARDS:
        raise UsageError(
            f"microbatches={microbatches} on {stages} stages: choose at most {MOST_FORWARDS // stages} for so many "
            "stages"
        )
    chosen = find(method)
    if workers is not None and not 1 <= workers <= stages:
        raise UsageError(f"workers={workers} for {stages} stages: choose between 1 and {stages}")
    if microbatches is not None:
        chosen = with_microbatches(chosen, microbatches)
    schedule, rules = chosen.plan(stages, workers)
    return MethodLayout(chosen, schedule, rules, turns=-(-(microbatches or MICROBATCHES) // schedule.per_turn))
