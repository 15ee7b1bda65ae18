"""torch's profiler over a few steps of a traced run: what ran inside each action."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from stretto.nn.stopwatch import recording_operations, silence
from stretto.schedule import Action
from stretto.schedule.lower import COLLECTIVES
from stretto.tracing import Recording, Span
from stretto.tracing.operation_spans import OPERATION, PROFILED, by_action, shallow
from stretto.trainer.trainer import Trainer

STEPS = 3  # that are profiled
MOST = 1 << 15  # operations of a step and a worker
CLOCK = "stretto: what time it is"
ROUNDS = 8  # of asking the profiler for its time, at each end
NODE = 1  # the scope of an operation that autograd runs, in a thread of its own on an accelerator


def profiled_steps(done: int, steps: int, ramp: int) -> range:
    """The steps, from 1, that are profiled of those after `done`: after the ramp, where the run is so long.

    The first step that is made, in which torch warms up, is one of them only where there is no other.
    """
    left = steps - done
    skipped = min(ramp + 1, max(left - STEPS, 1)) if left > 1 else 0
    first = done + 1 + skipped
    return range(first, min(first + STEPS, steps + 1))


class OperationProfile:
    """Profiles the steps that it stands around, if they are among `steps`, and adds what ran to the recordings.

    Training comes to the same numbers. A profiled step is slower by some microseconds an operation; recordings mark it,
    so that figures of the steady state are those of other steps. Starting and ending the profiler count for no step.
    """

    def __init__(self, trainer: Trainer, recordings: Sequence[Recording], steps: range) -> None:
        self._trainer, self._recordings, self._steps = trainer, recordings, steps

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The context of a step."""
        if step not in self._steps:
            yield
            return
        profiler = profile(activities=[ProfilerActivity.CPU])
        with self._trainer.pausing("profiler"), silence():
            profiler.start()
            times = told_times()
            recording_operations(on=False)
        start = perf_counter_ns()
        self._trainer.backend.profile(inside)
        try:
            yield
            end = perf_counter_ns()
        finally:
            self._trainer.backend.profile(None)
            recording_operations(on=True)
            times += told_times()
            profiler.stop()
        with self._trainer.pausing("profiler"):
            events: Sequence[Any] = profiler.events()  # type: ignore[no-untyped-call]
            operations = operations_of(events, times)
            for recording in self._recordings:
                recording.span(PROFILED, f"step {step}", start, end)
                add(recording, operations, start)


@contextmanager
def inside(action: Action) -> Iterator[None]:
    """The context of an action whose operations are recorded; those with which replicas agree are not."""
    recording_operations(on=action.kind not in COLLECTIVES)
    try:
        yield
    finally:
        recording_operations(on=False)


def told_times() -> list[tuple[int, int]]:
    """Events of the profiler's at known times: before and after each, in ns."""
    times = []
    for _ in range(ROUNDS):
        before = perf_counter_ns()
        with record_function(CLOCK):
            pass
        times.append((before, perf_counter_ns()))
    return times


def operations_of(events: Sequence[Any], times: Sequence[tuple[int, int]]) -> list[Span]:
    """The profiler's events as spans on this process's clock: of the thread that trains, and of autograd's threads."""
    asked = sorted((event for event in events if event.name == CLOCK), key=lambda event: event.time_range.start)
    if len(asked) < len(times):
        return []  # the profiler has lost events: no time is known
    middles = [(event.time_range.start + event.time_range.end) * 500 for event in asked]
    ends = [
        min((after - before, middle, (before + after) / 2 - middle) for (before, after), middle in pairs)
        for pairs in halves(list(zip(times, middles, strict=True)))
    ]
    (_, first, offset), (_, last, later) = ends
    drift = (later - offset) / (last - first)
    threads = {event.thread for event in events if event.name == CLOCK or event.scope == NODE}
    spans = []
    for event in events:
        if event.thread in threads and event.name != CLOCK and not event.is_async:
            start, end = (
                round(time + offset + drift * (time - first))
                for time in (event.time_range.start * 1000, event.time_range.end * 1000)
            )
            spans.append(Span(OPERATION, event.name, start, end))
    return spans


def halves(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """The first and the second half of a list."""
    return items[: len(items) // 2], items[len(items) // 2 :]


def add(recording: Recording, operations: Sequence[Span], since: int) -> None:
    """Record the operations that ran inside the actions of a worker since a time; the innermost only if there is room.

    They must not push the run's own events out of the recording.
    """
    clock = recording.offset
    actions = [
        span._replace(start=span.start - clock, end=span.end - clock)
        for span in recording.spans
        if span.lane == "compute" and span.start - clock >= since
    ]
    for within in shallow(by_action(actions, operations), MOST):
        for lane, name, start, end in within:
            recording.span(lane, name, start, end)
