"""What workers and messages are called in a trace, by every interpreter and on both ends."""

from stretto.schedule import Edge, Schedule


def channel(edge: Edge) -> str:
    """Values of one kind from one stage to another; within it, a message's number is its micro-batch."""
    return f"{edge.value} {edge.source.stage}>{edge.stage}"


def worker_name(worker: int, schedule: Schedule) -> str:
    """A worker with its stages."""
    own = [str(stage) for stage, home in sorted(schedule.worker_of.items()) if home == worker]
    return f"worker {worker}: stage{'s' * (len(own) > 1)} {', '.join(own)}"
