"""Zero-bubble pipelines (Qi et al. 2024, arXiv 2401.10241): weight gradients fill what would be a bubble.

A backward is split in I, which the stage below waits for, and W, which nobody waits for before the update. Time runs
to the right, F = I = W = 1, updates take no time; digits are forwards, small letters input gradients, capitals weight
gradients. Stage 0 has no stage below, so its backward stays whole ("aa").

    ZB-H1                       ZB-V
    3 ...0a1b2c3dA4eB5fCDEF     2:3 .. 0 1 2aA   3bB   4cC   5d e f D E F
    2 ..01.a2b3cA4dB5eCfDEF     2:2 ..0 1 2   3aA   4bB   5cC  d e f D E F
    1 .012..a3bA4cB5dCeDfEF     1:4 .   0 1aA2bB   3cC   4dD  5e f E  F  .
    0 0123...aa4bb5ccddeeff     1:1 .012 3      4aA   5bB   cC  d e fD EF.
                                0:5      0aA1bB2cC   3dD  4eE  5f      F..
                                0:0 01234         5aa   bb   cc  ddeeff ..

    ZB-H2
    3 ...0a1b2c3d4e5f6gABCDEFG
    2 ..012a3b4c5d6eAfBgCDEFG.
    1 .01234a5b6cAdBeCfDgEFG..
    0 0123456aabbccddeeffgg...

ZB-H1's bubble is (S-1)(F+I-W) as long as W takes no longer than F and I, 1F1B's (S-1)(F+I+W). ZB-H2 runs as many
forwards ahead as fit before the first gradient arrives, and holds twice as many activations: from 2S-1 micro-batches on
and with F = I = W its workers start one after the other and never idle, so the next turn begins at once. In ZB-V a
worker has two stages ("1:4" is stage 4 on worker 1; blank is the time in which it is at the other); from 2W-1
micro-batches on and with F = I = W no worker idles between its first and its last action, and none holds more than
1F1B's first, as in ZB-H1.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

from stretto.errors import UsageError
from stretto.schedule.action import Action
from stretto.schedule.dataflow import Edge, Rules
from stretto.schedule.library.gpipe import at_least_one, contiguous, forward, updates
from stretto.schedule.library.one_f_one_b import alternate
from stretto.schedule.reach import Reach
from stretto.schedule.schedule import Schedule

TICKS = {"F": 1, "B": 2, "I": 1, "W": 1}


def zb_h1(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """1F1B's order of forwards and input gradients, and no worker holds more activations than 1F1B's first.

    Several stages on a worker run a micro-batch one after the other, forward ascending and backward descending. Where
    workers have equally many stages it never takes longer than 1F1B, whatever F, I and W cost; otherwise a weight
    gradient that fills one bubble may delay a later action, by a few percent. Raises UsageError for counts that
    cannot be.
    """
    return handcrafted(num_stages, num_workers, microbatches, ahead=1, most=num_workers)


def zb_h2(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """As ZB-H1 with 2(W-1-w) + 1 forwards before worker w's first backward: it holds 2W - 1 activations at most.

    From 2W-1 micro-batches on and with F = I = W no worker idles between its first and its last action. Raises
    UsageError for counts that cannot be.
    """
    return handcrafted(num_stages, num_workers, microbatches, ahead=2, most=2 * num_workers - 1)


def handcrafted(num_stages: int, num_workers: int, microbatches: int, *, ahead: int, most: int) -> Schedule:
    """ZB-H1 or ZB-H2: `ahead` more forwards for each worker above, activations of `most` micro-batches a worker."""
    at_least_one(microbatches=microbatches)
    cut = contiguous(num_stages, num_workers)

    def order(worker: int, stages: range) -> Iterator[Action]:
        ups = [forward(stages, m) for m in range(microbatches)]
        downs = [[down(stage, m) for stage in reversed(stages)] for m in range(microbatches)]
        return chain.from_iterable(alternate(ups, downs, ahead=ahead * (num_workers - 1 - worker)))

    room = [len(stages) * min(most, microbatches) for stages in cut]
    return fill([list(order(worker, stages)) for worker, stages in enumerate(cut)], room, microbatches)


def zb_v(num_stages: int, num_workers: int, microbatches: int) -> Schedule:
    """Two stages a worker, s and 2W-1-s: the model goes through the workers to the last and comes back.

    A micro-batch's gradient starts on the worker where its forward began, so that all workers hold equally much: 2W
    stages' activations, as many as 1F1B's first worker. Raises UsageError for counts that cannot be.
    """
    at_least_one(num_stages=num_stages, num_workers=num_workers, microbatches=microbatches)
    check_two_stages_each(num_stages, num_workers)
    orders = [list(v_order(worker, num_workers, microbatches)) for worker in range(num_workers)]
    # what the paper's phases hold: the second and third bound matter where the pipeline is never full
    room = [min(2 * num_workers, 2 * microbatches, microbatches + worker + 1) for worker in range(num_workers)]
    return fill(orders, room, microbatches)


def check_two_stages_each(num_stages: int, num_workers: int) -> None:
    """Raise UsageError unless there are twice as many stages as workers."""
    if num_stages != 2 * num_workers:
        other = "" if num_stages % 2 else f", or {num_stages // 2} workers"
        raise UsageError(
            f"num_stages={num_stages} on num_workers={num_workers}: every worker holds two stages; "
            f"use {2 * num_workers} stages{other}"
        )


def v_order(worker: int, num_workers: int, microbatches: int) -> Iterator[Action]:
    """The paper's phases (section 6), without weight gradients: warm-up, pairs in the steady state, cool-down."""
    low, high = worker, 2 * num_workers - 1 - worker
    count = max(
        microbatches, 2 * num_workers - 1
    )  # those of a full pipeline; what exceeds `microbatches` is left out below
    above = num_workers - 1 - worker
    phases = [
        *[("F", low)] * (2 * above + 1),
        *[("F", high), ("F", low)] * worker,
        *[("F", high), ("I", high)] * (above + 1),
        *[("F", low), ("I", low), ("F", high), ("I", high)] * (count - num_workers - above),
        *[("I", low), ("F", high), ("I", high)] * above,
        *[("I", low), ("I", high)] * worker,
        *[("I", low)] * (above + 1),
    ]
    begun: Counter[tuple[str, int]] = Counter()
    for kind, stage in phases:
        microbatch = begun[kind, stage]
        begun[kind, stage] += 1
        if microbatch < microbatches:
            yield Action("F", stage, microbatch) if kind == "F" else down(stage, microbatch)


def down(stage: int, microbatch: int) -> Action:
    """The backward action of a stage: I, but B on stage 0, which sends no gradient on."""
    return Action("I" if stage else "B", stage, microbatch)


def fill(orders: Sequence[Sequence[Action]], room: Sequence[int], microbatches: int) -> Schedule:
    """Put the weight gradients into each worker's order of everything else, on a clock where F = I = W = 1.

    At every tick a free worker takes the next action of its order, if the action's operands have been made and, for a
    forward, if it holds fewer activations than it has `room` for; else its oldest weight gradient; else it idles.
    """
    num_stages = 1 + max(action.stage for order in orders for action in order)
    rules = Rules(Reach((*[None] * (num_stages - 1), num_stages - 1)), frozenset(range(1, num_stages)), microbatches)
    when = {edge: 0 for m in range(microbatches) for edge in rules.loads(m)}
    workers = [FillState(deque(order), places) for order, places in zip(orders, room, strict=True)]
    home = {action.stage: index for index, order in enumerate(orders) for action in order}
    wakes = [(0, index) for index in range(len(workers))]  # a heap: ticks at which a worker may be able to go on
    while wakes:
        tick, index = heappop(wakes)
        worker = workers[index]
        action = worker.take(tick, rules, when)
        if action is not None:
            made = rules.makes(action)
            when.update(dict.fromkeys(made, worker.busy))
            for other in {index, *(home[edge.stage] for edge in made if edge.stage in home)}:
                heappush(wakes, (worker.busy, other))
    assert not any(worker.todo or worker.late for worker in workers), "no worker can go on"
    return Schedule(tuple(worker.whole(microbatches) for worker in workers), microbatches)


@dataclass
class FillState:
    """One worker while `fill` runs."""

    todo: deque[Action]  # forwards and input gradients, in their order
    room: int  # the most activations it may hold
    held: int = 0
    busy: int = 0  # until this tick
    late: deque[Action] = field(default_factory=deque)  # weight gradients that can be done at any time
    body: list[Action] = field(default_factory=list)

    def take(self, tick: int, rules: Rules, when: Mapping[Edge, int]) -> Action | None:
        """The action that the worker begins at this tick, or None."""
        if self.busy > tick:
            return None
        if self.todo and self.may_begin(tick, rules, when):
            action = self.todo.popleft()
        elif self.late:
            action = self.late.popleft()
        else:
            return None
        if action.kind == "I":
            self.late.append(Action("W", action.stage, action.microbatch))
        self.held += (action.kind == "F") - (action.kind in "BW")
        self.busy = tick + TICKS[action.kind]
        self.body.append(action)
        return action

    def may_begin(self, tick: int, rules: Rules, when: Mapping[Edge, int]) -> bool:
        """Whether the next action's operands have been made and, for a forward, there is room for its activation."""
        if self.todo[0].kind == "F" and self.held >= self.room:
            return False
        return all(edge in when and when[edge] <= tick for edge in rules.needs(self.todo[0]))

    def whole(self, microbatches: int) -> tuple[Action, ...]:
        """All actions of the worker, its updates at the end."""
        return (*self.body, *updates(sorted({action.stage for action in self.body}), microbatches))
