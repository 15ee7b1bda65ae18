"""A traced run against what was predicted of it: step by step, and worker by worker.

Communication is what a step takes longer than it would with messages that take no time: of the run, by simulating it
with the durations that its actions had; of the prediction, by simulating it with its own.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

from stretto.report.turns import action_of, mean_durations, turn_starts
from stretto.schedule import Rules, Schedule
from stretto.tracing import Recording

if TYPE_CHECKING:
    from stretto.simulate import Durations, Network
    from stretto.simulate.network import Sizes

OWN = "the mean times of the run's own actions, messages taking none"
LEAST = 3  # steps of a full pipeline


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a prediction is made from: nanoseconds of actions, what messages travel on, bytes of each stage.

    `weights` and `activations` (of one micro-batch) are bytes by stage; empty where they are not known.
    """

    source: str
    durations: "Durations"
    network: "Network | None" = None
    sizes: "Sizes | None" = None
    weights: tuple[float, ...] = ()
    activations: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A quantity as it was measured, and as it was predicted; None for what is not known."""

    name: str
    unit: str  # "s" or "B", or nothing for a count
    measured: float | None
    predicted: float | None

    @property
    def error(self) -> float | None:
        """How much too large the prediction is, in parts of what was measured."""
        if self.measured is None or self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A run's steps of a full pipeline: {step: seconds}, those after which the run paused left out, and the rows."""

    run: str
    method: str
    source: str
    steps: Mapping[int, float]
    seconds: float
    rows: tuple[Compared, ...] = field(default=())
    emulated: bool = False

    @property
    def errors(self) -> list[float]:
        """Of every step, how much too long the prediction is, in parts of it."""
        return [self.seconds / each - 1 for each in self.steps.values()]


def predicted(
    run: str,
    method: str,
    recordings: Sequence[Recording],
    schedule: Schedule,
    rules: Rules,
    prediction: Prediction,
    *,
    paused: Collection[int] = (),
    held: Mapping[str, Sequence[float]] | None = None,
    among: range = range(sys.maxsize),
) -> Predicted | None:
    """Compare; None where the recordings have no stretch of a full pipeline.

    The run did something else after the steps `paused`, from 1. `held` are measured bytes by stage ("weights",
    "activations"), the most at any time. Only the turns `among` these follow the schedule.
    """
    full = schedule.drain + 1
    steady = among[full:]
    steps = steps_of(recordings[0], schedule, steady, paused)
    if len(steps) < LEAST:
        return None
    emulated = len({(recording.host, recording.process) for recording in recordings}) == 1 < len(recordings)
    own = mean_durations(recordings, schedule, steady)
    turns = [turn - 1 for turn in steps]
    computed = computing(recordings, schedule, turns)
    if emulated:
        seconds = sum(busy_of(schedule, worker, prediction) for worker in range(schedule.num_workers))
        rows = [Compared(name="a step", unit="s", measured=median(steps.values()), predicted=seconds)]
        rows += computes(computed, schedule, prediction)
    else:
        seconds = period_of(schedule, rules, prediction)
        alone = period_of(schedule, rules, Prediction(source="", durations=own))
        ideal = period_of(schedule, rules, Prediction(source="", durations=prediction.durations))
        step = median(steps.values())
        rows = [
            Compared(name="a step", unit="s", measured=step, predicted=seconds),
            Compared(name="of it communication", unit="s", measured=max(0.0, step - alone), predicted=seconds - ideal),
            *computes(computed, schedule, prediction),
            *(
                Compared(name=f"worker {worker} stands still", unit="s", measured=max(0.0, step - busy),
                         predicted=seconds - busy_of(schedule, worker, prediction))
                for worker, busy in enumerate(computed)
            ),
        ]  # fmt: skip
    rows += memory(recordings, schedule, rules, prediction, held or {})
    return Predicted(run=run, method=method, source=prediction.source, steps=steps, seconds=seconds, rows=tuple(rows),
                     emulated=emulated)  # fmt: skip


def steps_of(recording: Recording, schedule: Schedule, among: range, paused: Collection[int]) -> dict[int, float]:
    """The seconds from the beginning of each step on the first worker to that of the next, steps counted from 1."""
    starts = turn_starts(recording, schedule)
    return {
        turn + 1: (starts[turn + 1] - start) / 1e9
        for turn, start in sorted(starts.items())
        if turn in among and turn + 1 in starts and turn + 1 not in paused
    }


def computing(recordings: Sequence[Recording], schedule: Schedule, turns: Collection[int]) -> list[float]:
    """The mean seconds that each worker computes for a minibatch."""
    chosen = set(turns)
    found = []
    for recording in recordings:
        spans = [(span, action) for span in recording.spans if (action := action_of(span)) is not None]
        own = [span.end - span.start for span, action in spans if action.microbatch // schedule.per_turn in chosen]
        found.append(sum(own) / len(chosen) / 1e9)
    return found


def computes(computed: Sequence[float], schedule: Schedule, prediction: Prediction) -> list[Compared]:
    """How long each worker computes."""
    return [
        Compared(name=f"worker {worker} computes", unit="s", measured=busy,
                 predicted=busy_of(schedule, worker, prediction))
        for worker, busy in enumerate(computed)
    ]  # fmt: skip


def busy_of(schedule: Schedule, worker: int, prediction: Prediction) -> float:
    """The predicted seconds of a worker's actions in a turn."""
    return sum(prediction.durations(action) for action in schedule.body[worker]) / 1e9


def period_of(schedule: Schedule, rules: Rules, prediction: Prediction) -> float:
    """The predicted seconds of a turn once the pipeline is full, links and their queues included."""
    from stretto.simulate import simulate
    from stretto.simulate.simulator import no_bytes

    settled, over = 4 * (schedule.drain + 1), 12
    timeline = simulate(
        schedule, rules, settled + over + schedule.drain + 1, prediction.durations,
        network=prediction.network, sizes=prediction.sizes or no_bytes,
    )  # fmt: skip
    kind, stage, offset = schedule.body[0][0]
    starts = {
        span.action.microbatch // schedule.per_turn: span.start
        for span in timeline.spans
        if span.action[:2] == (kind, stage) and (span.action.microbatch - offset) % schedule.per_turn == 0
    }
    first = min(starts) + settled
    return (starts[first + over] - starts[first]) / over / 1e9


def memory(
    recordings: Sequence[Recording], schedule: Schedule, rules: Rules, prediction: Prediction,
    held: Mapping[str, Sequence[float]],
) -> list[Compared]:  # fmt: skip
    """What each stage holds at most: forwards, and bytes where they are known."""
    from stretto.simulate import simulate

    timeline = simulate(schedule, rules, 2 * schedule.drain + 2, prediction.durations)
    counted = most_counted(recordings)
    rows = []
    for stage in range(schedule.num_stages):
        keeps = timeline.peak_graphs[stage] + timeline.peak_inputs[stage]
        rows.append(Compared(name=f"stage {stage}, forwards held", unit="", measured=counted.get(stage),
                             predicted=keeps))  # fmt: skip
        bytes_ = {"weights": prediction.weights, "activations": [each * keeps for each in prediction.activations]}
        for what, told in bytes_.items():
            if told:
                seen = held.get(what, ())
                rows.append(Compared(name=f"stage {stage}, {what}", unit="B", predicted=told[stage],
                                     measured=float(seen[stage]) if seen else None))  # fmt: skip
    return rows


def most_counted(recordings: Sequence[Recording]) -> dict[int, float]:
    """The most forwards that each stage held, as its worker counted them."""
    most: dict[int, float] = {}
    for recording in recordings:
        for name, _, value in recording.counts:
            if name.startswith("forwards held by stage "):
                stage = int(name.rsplit(" ", 1)[1])
                most[stage] = max(most.get(stage, 0.0), value)
    return most


def typical_error(each: Predicted) -> float:
    """The mean of the sizes of the errors of all steps."""
    return fmean(abs(error) for error in each.errors)
