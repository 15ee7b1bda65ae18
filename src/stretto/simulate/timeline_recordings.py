"""A simulated timeline as recordings: the form in which real and emulated runs are kept and drawn."""

from collections.abc import Callable, Mapping, Sequence

from stretto.schedule import Edge, Rules
from stretto.schedule.timed_action import Span
from stretto.simulate import Timeline
from stretto.simulate.timeline import SimulatedMessage
from stretto.tracing.naming import channel, worker_name
from stretto.tracing.recording import Recording

UNIT = 1_000_000  # nanoseconds that stand for one unit of simulated time: Perfetto then shows units as milliseconds


def recordings(timeline: Timeline, rules: Rules, *, unit: float = UNIT) -> list[Recording]:
    """One recording a worker: what it computes, what it waits for in between, what it sends and receives.

    A wait is named after the action whose value arrived last. Messages that take time have spans on the lanes "send"
    and "receive", collectives that overlap with computing on "collective". `unit`: nanoseconds per unit of simulated
    time.
    """
    schedule = timeline.schedule
    by_worker = [Recording(worker, name=worker_name(worker, schedule)) for worker in range(schedule.num_workers)]
    arrivals = {Edge(m.value, m.source, m.stage): m.arrival for m in timeline.messages}
    beside = timeline.lowered.beside
    free = [0.0] * len(by_worker)

    def at(time: float) -> int:
        return round(time * unit)

    for span in timeline.spans:
        recording = by_worker[span.worker]
        if span.action.kind in beside:
            recording.span("collective", span.action, at(span.start), at(span.end))
        else:
            if span.start > free[span.worker]:
                recording.span("wait", last_of(span, rules, arrivals), at(free[span.worker]), at(span.start))
            recording.span("compute", span.action, at(span.start), at(span.end))
            free[span.worker] = span.end
        for edge in rules.makes(span.action):
            if schedule.worker_of.get(edge.stage, span.worker) == span.worker:  # the caller has no worker: no message
                arrivals[edge] = span.end
            else:
                recording.sent(channel(edge), span.action.microbatch, at(span.end))
    for message in timeline.messages:
        record(message, by_worker, at)
    return by_worker


def record(message: SimulatedMessage, by_worker: Sequence[Recording], at: Callable[[float], int]) -> None:
    """Write a message on the lanes of the workers that send and receive it."""
    _, source, _, sender, receiver, sent, arrival, hold = message
    name = channel(Edge(message.value, source, message.stage))
    by_worker[receiver].received(name, source.microbatch, at(arrival))
    if hold:
        by_worker[sender].span("send", f"{name} {source.microbatch}", at(sent), at(sent + hold))
        by_worker[receiver].span("receive", f"{name} {source.microbatch}", at(arrival - hold), at(arrival))


def last_of(span: Span, rules: Rules, arrivals: Mapping[Edge, float]) -> str:
    """The source of the last value to arrive, of those that a span needs; its stage's merge if it needs none."""
    needs = [edge for edge in rules.needs(span.action) if edge in arrivals]
    last = max(needs, key=arrivals.__getitem__, default=None)
    return f"{span.action.stage}M" if last is None else str(last.source)
