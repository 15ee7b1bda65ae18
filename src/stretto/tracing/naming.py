"""Names of workers and messages in a trace, equal in all interpreters and at both ends of a message."""

from stretto.schedule import Edge, Schedule


def channel(edge: Edge) -> str:
    """The channel of a message: kind of value, sending and receiving stage. The message's number is its micro-batch."""
    return f"{edge.value} {edge.source.stage}>{edge.stage}"


def worker_name(worker: int, schedule: Schedule) -> str:
    """The number of a worker and its stages, e.g. `worker 1: stages 2, 3`."""
    stages = [str(stage) for stage, owner in sorted(schedule.worker_of.items()) if owner == worker]
    return f"worker {worker}: stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
