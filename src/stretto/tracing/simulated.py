"""A simulation, as if each of its workers had recorded it."""

from collections.abc import Mapping

from stretto.schedule import Edge, Rules
from stretto.schedule.span import Span
from stretto.simulate import Timeline
from stretto.tracing.naming import channel, worker_name
from stretto.tracing.recording import Recording

UNIT = 1_000_000  # nanoseconds that stand for one unit of simulated time: Perfetto then shows units as milliseconds


def recordings(timeline: Timeline, rules: Rules, *, latency: float = 0, unit: float = UNIT) -> list[Recording]:
    """One recording a worker: what it computes, what it waits for meanwhile, what it sends and receives.

    `latency` is the one that the timeline was simulated with; a wait is named after the action whose value came last.
    """
    schedule = timeline.schedule
    made = [Recording(worker, name=worker_name(worker, schedule)) for worker in range(schedule.num_workers)]
    arrivals: dict[Edge, float] = {}
    free = [0.0] * len(made)

    def at(time: float) -> int:
        return round(time * unit)

    for span in timeline.spans:
        own = made[span.worker]
        if span.start > free[span.worker]:
            own.span("wait", last_of(span, rules, arrivals), at(free[span.worker]), at(span.start))
        own.span("compute", span.action, at(span.start), at(span.end))
        free[span.worker] = span.end
        for edge in rules.makes(span.action):
            home = schedule.worker_of.get(edge.stage, span.worker)  # the caller, who gets the loss, is everywhere
            arrivals[edge] = span.end + latency * (home != span.worker)
            if home != span.worker:
                own.sent(channel(edge), span.action.microbatch, at(span.end))
                made[home].received(channel(edge), span.action.microbatch, at(arrivals[edge]))
    return made


def last_of(span: Span, rules: Rules, arrivals: Mapping[Edge, float]) -> str:
    """The action whose value arrived last of those that a span needed."""
    needs = [edge for edge in rules.needs(span.action) if edge in arrivals]
    return str(max(needs, key=arrivals.__getitem__).source)
