"""Checks that a schedule is complete and cannot deadlock, with buffered sends and with rendezvous sends."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from stretto.errors import ScheduleError
from stretto.options.checks import is_among, of_kind, shown, whole
from stretto.schedule.action import Action
from stretto.schedule.dataflow import Edge, Rules
from stretto.schedule.proof import proved
from stretto.schedule.schedule import MOST_TURNS, Schedule

SENDS = ("buffered", "rendezvous")


def check(schedule: Schedule, rules: Rules, turns: int | None = None) -> None:
    """Raise ScheduleError, naming the first offending action, unless `schedule` is complete and free of deadlock.

    Complete: every stage runs every micro-batch forward once, again where the rules recompute it, backward once (B, or
    I and W where they split it), and every update once. Free of deadlock: it runs to its end under both kinds of sends.
    With `turns` the schedule is run for so many turns, without tensors. Without, it is checked for any number of turns:
    one turn proves it (`proof`), or a run with fill, steady state and drain shows it.

    *buffered*: a value is there once it is made. *rendezvous*: the values of one kind from one stage to another travel
    through one channel in the order they are made, and one leaves the channel only when the receiver reaches an action
    that needs it; the sender computes on meanwhile. (Point-to-point messages with a tag for each channel behave so.
    A single channel for each pair of workers would be too strict: zb-v's workers exchange activations and gradients
    both ways, and taking them in the order they are made would cost half as much memory again.)
    """
    of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
    of_kind("rules", rules, Rules, "stretto.schedule.Rules.of(schedule, reach)")
    if turns is not None:
        whole("turns", turns, 0, MOST_TURNS)
        run(schedule, rules, turns)
        return
    enough = 2 * schedule.drain + 3 + rules.lookback  # fill, steady state and drain
    if enough > MOST_TURNS or not proved(schedule, rules, enough):
        run(schedule, rules, enough)


def run(schedule: Schedule, rules: Rules, turns: int) -> None:
    """Raise ScheduleError unless so many turns, one after the other, are complete and end under both kinds of sends."""
    complete(schedule, rules, turns)
    try:
        run_dry(schedule, rules, turns, "rendezvous")  # what ends here also ends with buffers, where values come sooner
    except ScheduleError:
        run_dry(schedule, rules, turns, "buffered")
        raise


def complete(schedule: Schedule, rules: Rules, turns: int) -> None:
    """Raise ScheduleError unless every action of every micro-batch is in the schedule once."""
    if schedule.num_stages != rules.num_stages:
        raise ScheduleError(f"the schedule drives {schedule.num_stages} stages, the rules know {rules.num_stages}")
    for stage in range(schedule.num_stages):
        if not rules.sweeps_are_possible(stage):
            raise ScheduleError(
                f"{Action('B', stage, 0)} cannot be one sweep: stage {stage} sends down less than it uses itself; "
                "split its backward into I and W"
            )
    found = Counter(action for worker in range(schedule.num_workers) for action in schedule.unroll(worker, turns))
    for microbatch in range(turns * schedule.per_turn):
        for stage in range(schedule.num_stages):
            for kind in rules.kinds(stage, microbatch):
                action = Action(kind, stage, microbatch)
                times = found.pop(action, 0)
                if times != 1:
                    how = "is missing from" if times == 0 else f"stands {times} times on"
                    raise ScheduleError(f"{action} {how} worker {schedule.worker_of[stage]}")
    for action in found:
        raise ScheduleError(f"{action} has no place in this schedule (worker {schedule.worker_of[action.stage]})")


def run_dry(schedule: Schedule, rules: Rules, turns: int, sends: str) -> None:
    """Run a schedule without tensors. Raise ScheduleError at a deadlock, naming what each worker waits for."""
    if not is_among(sends, SENDS):
        raise ScheduleError(f"sends={shown(sends)}: choose from {', '.join(SENDS)}")
    queues = [
        deque((action, rules.needs(action)) for action in schedule.unroll(worker, turns))
        for worker in range(schedule.num_workers)
    ]
    there = {edge for m in range(turns * schedule.per_turn) for edge in rules.loads(m)}
    channels: dict[tuple[str, int, int], deque[Edge]] = {}

    def receive(needs: Sequence[Edge]) -> None:
        for edge in needs:
            channel = channels.get(channel_of(edge))
            while channel and channel[0] in needs:
                there.add(channel.popleft())

    progress = True
    while progress:
        progress = False
        for worker, queue in enumerate(queues):
            while queue:
                action, needs = queue[0]
                receive(needs)
                if not there.issuperset(needs):
                    break
                queue.popleft()
                there.difference_update(rules.frees(action, needs))
                progress = True
                for edge in rules.makes(action):
                    peer = schedule.worker_of.get(edge.stage, worker)
                    if peer == worker or sends == "buffered":
                        there.add(edge)
                    else:
                        channels.setdefault(channel_of(edge), deque()).append(edge)
    if any(queues):
        left = [deque(action for action, _ in queue) for queue in queues]
        raise ScheduleError(f"deadlock with {sends} sends: {explain(left, rules, there)}")


def channel_of(edge: Edge) -> tuple[str, int, int]:
    """The channel a value travels through: its name, the stage that makes it, the stage that uses it."""
    return edge.value, edge.source.stage, edge.stage


def explain(queues: Iterable[deque[Action]], rules: Rules, there: set[Edge]) -> str:
    """What each blocked worker waits for: "worker 1 waits for 0F3's activation before 1F3"; `there` has been made."""
    clauses = []
    for worker, queue in enumerate(queues):
        if queue:
            missing = next(edge for edge in rules.needs(queue[0]) if edge not in there)
            clauses.append(f"worker {worker} waits for {missing.source}'s {missing.value} before {queue[0]}")
    return "; ".join(clauses)
