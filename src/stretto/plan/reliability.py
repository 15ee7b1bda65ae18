"""What failures of workers cost a plan: the share of time that is useful work, and how often to write checkpoints.

The complete model of Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22. A job fails at random, at a constant rate, on average once in `mtbf` seconds. It
writes a checkpoint of `checkpoint` seconds after each `interval` seconds of work. A failure stops all workers, replicas
included, and loses what was done since the last whole checkpoint; after `restart` seconds the job goes on, on as many
workers. It may fail while it writes a checkpoint, and while it restarts, too. The work of an interval then takes on
average

    mtbf exp(restart / mtbf) (exp((interval + checkpoint) / mtbf) - 1)

seconds. The interval of the highest goodput, x mtbf, is where exp(x + checkpoint / mtbf) (1 - x) = 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stretto.cost.cluster import Cluster, check_not_negative, check_positive
from stretto.errors import UsageError
from stretto.plan.branch_and_bound import Plan
from stretto.plan.problem import Problem

MOST = 700.0  # exponents: beyond, floats overflow, and goodput is nothing
NEEDED = {  # what it takes to know goodput, in the words of the command line
    "mtbf_hours": "--mtbf-hours, the mean time between two failures of one worker (or mtbf_hours of every device in "
    "the cluster's file)",
    "checkpoint_seconds": "--checkpoint-seconds, or --storage-bandwidth in bytes/s, from which they follow (or "
    "storage_bandwidth in the cluster's file)",
    "restart_seconds": "--restart-seconds, from a failure until training goes on (or restart_seconds in the cluster's "
    "file)",
}


def needs(missing: Iterable[str]) -> str:
    """The options that are missing, of NEEDED, in words."""
    return "; and ".join(NEEDED[key] for key in missing)


def goodput(interval: float, *, mtbf: float, checkpoint: float, restart: float) -> float:
    """The share of time that is useful work, from 0 to 1. All are seconds; `mtbf` and `interval` may be infinite."""
    if math.isinf(mtbf):
        return 1.0 if math.isinf(interval) else interval / (interval + checkpoint)
    length = (interval + checkpoint) / mtbf
    if length + restart / mtbf > MOST:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(length))


def best_interval(mtbf: float, checkpoint: float) -> float:
    """The seconds of work between two checkpoints with the highest goodput; infinite if nothing fails.

    Young (1974) and Daly (2006) give approximations of it: sqrt(2 checkpoint mtbf), if failures are rare.
    """
    if math.isinf(mtbf):
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if middle + checkpoint / mtbf + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How often workers fail, and what checkpoints and restarts take, in seconds.

    `mtbf_hours` is of one worker; None takes that of each device. A `checkpoint_interval` of None is the best one.
    `checkpoint_seconds` keep all workers from working; None divides the bytes of weights and optimizer state by
    `storage_bandwidth`. None elsewhere is not known. Raises UsageError for numbers out of range.
    """

    mtbf_hours: float | None = None
    checkpoint_interval: float | None = None
    checkpoint_seconds: float | None = None
    storage_bandwidth: float | None = None
    restart_seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive("mtbf_hours", self.mtbf_hours, "give hours of one worker, such as 50000, or inf for none")
        check_positive("checkpoint_interval", self.checkpoint_interval, "give seconds of work, or auto")
        check_not_negative("checkpoint_seconds", self.checkpoint_seconds, "give seconds of one checkpoint")
        check_positive("storage_bandwidth", self.storage_bandwidth, "give the bytes/s of all workers together, 20e9")
        check_not_negative("restart_seconds", self.restart_seconds, "give seconds from a failure to the next step")
        if self.checkpoint_seconds is not None and self.storage_bandwidth is not None:
            raise UsageError(
                f"checkpoint_seconds = {self.checkpoint_seconds:g} and storage_bandwidth = "
                f"{self.storage_bandwidth:g}: the time of a checkpoint follows from either; give one of them"
            )

    def on(self, cluster: Cluster) -> "Reliability":
        """The same, with what the cluster's file says of what is not given."""
        storage = None if self.checkpoint_seconds is not None else cluster.storage_bandwidth
        return replace(
            self,
            storage_bandwidth=self.storage_bandwidth or storage,
            restart_seconds=cluster.restart_seconds if self.restart_seconds is None else self.restart_seconds,
        )

    def missing(self, cluster: Cluster) -> list[str]:
        """What is not known, among NEEDED; the figures of the cluster's file are known already."""
        devices = (cluster.devices[kind.device] for kind in dict.fromkeys(cluster.kinds))
        known = {
            "mtbf_hours": self.mtbf_hours is not None or all(device.mtbf_hours is not None for device in devices),
            "checkpoint_seconds": self.checkpoint_seconds is not None or self.storage_bandwidth is not None,
            "restart_seconds": self.restart_seconds is not None,
        }
        return [key for key in NEEDED if not known[key]]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The `share` of a plan's time that is useful work, where one of its workers fails once in `mtbf_seconds`.

    A checkpoint takes `checkpoint_seconds` and is written after every `checkpoint_steps` steps, which take
    `interval_seconds`; None for never, where nothing fails. `checkpoint_bytes` is what it holds.
    """

    share: float
    mtbf_seconds: float
    checkpoint_steps: int | None
    interval_seconds: float | None
    checkpoint_seconds: float
    checkpoint_bytes: float
    restart_seconds: float


def goodput_of(plan: Plan, problem: Problem, known: Reliability) -> Goodput:
    """The goodput of a plan; nothing may be `missing` in what is known."""
    c, hours, restart = plan.candidate, known.mtbf_hours, known.restart_seconds
    own_rate = problem.cluster.failures_per_second(c.placement or range(c.workers))
    rate = own_rate if hours is None else c.workers / hours / 3600
    num_bytes, seconds = checkpoint_bytes(problem), known.checkpoint_seconds
    if seconds is None and known.storage_bandwidth is not None:
        seconds = num_bytes / known.storage_bandwidth
    assert rate is not None, "checked by `missing`"
    assert restart is not None, "checked by `missing`"
    assert seconds is not None, "checked by `missing`"
    mtbf = math.inf if rate == 0 else 1 / rate
    steps = steps_between(plan.seconds, mtbf, seconds, known.checkpoint_interval)
    interval = math.inf if steps is None else steps * plan.seconds
    return Goodput(
        share=goodput(interval, mtbf=mtbf, checkpoint=seconds, restart=restart),
        mtbf_seconds=mtbf,
        checkpoint_steps=steps,
        interval_seconds=None if steps is None else interval,
        checkpoint_seconds=seconds,
        checkpoint_bytes=num_bytes,
        restart_seconds=restart,
    )


def steps_between(step: float, mtbf: float, checkpoint: float, interval: float | None) -> int | None:
    """The steps between two checkpoints: whole ones, and one at least; None if the best is to write none."""
    seconds = best_interval(mtbf, checkpoint) if interval is None else interval
    return None if math.isinf(seconds) else max(1, round(seconds / step))


def checkpoint_bytes(problem: Problem) -> float:
    """The bytes of weights and optimizer state: once, however many replicas there are; without those of heads."""
    return sum(layer.parameter_bytes + problem.state(layer) for layer in problem.layers)
