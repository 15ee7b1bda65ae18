"""`Schedule`: each worker's actions in order, as one repeating turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stretto.errors import ScheduleError
from stretto.options.checks import is_whole, shown, whole
from stretto.schedule.action import KINDS, Action

MOST_TURNS = 1_000_000
Body = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Schedule:
    """One repeating *turn*: for each worker a list of actions whose micro-batch is an offset.

    In turn n, `per_turn` micro-batches enter: n*per_turn and those after it. An action with offset o is issued for
    micro-batch n*per_turn + o and skipped when that one has not entered (or never will): warm-up and drain need no
    lists of their own. Pipelined Backpropagation is `F(0) B(-2(S-1-s)) U(-2(S-1-s))` on stage s; a synchronous
    schedule is its whole minibatch, with offsets 0 .. per_turn-1 only.

    Raises ScheduleError for an offset of the future, an unknown kind, an action listed twice, a stage on two workers
    or a stage that is missing.
    """

    body: Body
    per_turn: int = 1

    def __post_init__(self) -> None:
        if not is_whole(self.per_turn):
            raise ScheduleError(f"per_turn={shown(self.per_turn)}: give a whole number of micro-batches, at least 1")
        if self.per_turn < 1:
            raise ScheduleError(f"per_turn is {self.per_turn}: at least one micro-batch must enter in a turn")
        seen: set[Action] = set()
        home: dict[int, int] = {}
        for worker, actions in enumerate(rows(self.body)):
            for action in actions:
                check_action(action, worker)
                if action.kind not in KINDS:
                    raise ScheduleError(
                        f"worker {worker}: {action} has the unknown kind {action.kind!r}; kinds are {', '.join(KINDS)}"
                    )
                if action.microbatch >= self.per_turn:
                    raise ScheduleError(
                        f"worker {worker}: {action} is for a micro-batch that enters in a later turn; "
                        f"offsets go up to per_turn - 1 = {self.per_turn - 1}"
                    )
                if action in seen:
                    raise ScheduleError(f"worker {worker}: {action} stands twice in the body")
                if home.setdefault(action.stage, worker) != worker:
                    raise ScheduleError(
                        f"stage {action.stage} stands on worker {home[action.stage]} and on worker {worker}"
                    )
                seen.add(action)
        if sorted(home) != list(range(len(home))) or not home:
            raise ScheduleError(f"stages must be 0, 1, 2, ... without gaps; the body has {sorted(home)}")

    @cached_property
    def worker_of(self) -> dict[int, int]:
        """The worker each stage lives on."""
        return {action.stage: worker for worker, actions in enumerate(self.body) for action in actions}

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.worker_of)

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.body)

    @cached_property
    def drain(self) -> int:
        """Turns after the last minibatch until everything that entered is finished."""
        return max(-(action.microbatch // self.per_turn) for actions in self.body for action in actions)

    def turn(self, worker: int, n: int, until: int | None = None, since: int = 0) -> Iterator[Action]:
        """The actions of `worker` in turn n, with absolute micro-batches.

        `until` is the number of micro-batches that enter in all: None while training goes on, set to drain. `since`
        is the first micro-batch that entered after the last drain; those before it are finished.
        """
        first = n * self.per_turn
        for kind, stage, offset in self.body[worker]:
            microbatch = first + offset
            if microbatch >= since and (until is None or microbatch < until):
                yield Action(kind, stage, microbatch)

    def unroll(self, worker: int, turns: int) -> list[Action]:
        """Everything `worker` does when `turns` turns enter and the pipeline drains."""
        whole("worker", worker, 0, self.num_workers - 1)
        whole("turns", turns, 0, MOST_TURNS)
        until = turns * self.per_turn
        return [action for n in range(turns + self.drain) for action in self.turn(worker, n, until)]

    def of_stage(self, stage: int) -> tuple[Action, ...]:
        """The body of one stage, in its own order: all that its numbers depend on."""
        return self._stages[stage]

    @cached_property
    def _stages(self) -> dict[int, tuple[Action, ...]]:
        orders: dict[int, list[Action]] = {stage: [] for stage in self.worker_of}
        for actions in self.body:
            for action in actions:
                orders[action.stage].append(action)
        return {stage: tuple(order) for stage, order in orders.items()}


def rows(body: Body) -> Body:
    """The body. Raises ScheduleError if it is not a tuple or list of actions for each worker."""
    if not isinstance(body, tuple | list):
        raise ScheduleError(f"body={shown(body)}: give a tuple of actions for each worker")
    for worker, actions in enumerate(body):
        if not isinstance(actions, tuple | list):
            raise ScheduleError(f"worker {worker}: {shown(actions)}: give a tuple of actions, (Action('F', 0, 0), ...)")
    return body


def check_action(action: Action, worker: int) -> None:
    """Raise ScheduleError for anything but an Action with a kind, a stage and an offset."""
    if not isinstance(action, Action):
        raise ScheduleError(f"worker {worker}: {shown(action)} is no action: write stretto.schedule.Action('F', 0, 0)")
    kind, stage, microbatch = action
    if not isinstance(kind, str) or not is_whole(stage) or stage < 0 or not is_whole(microbatch):
        raise ScheduleError(
            f"worker {worker}: Action({shown(kind)}, {shown(stage)}, {shown(microbatch)}): give a kind, a stage from 0 "
            "on and the offset of a micro-batch, Action('F', 0, 0)"
        )


def side_by_side(parts: Sequence[Schedule], workers: Sequence[int]) -> Schedule:
    """Schedules of consecutive stages as one: those of each part on workers of its own, from `workers[part]` on.

    Parts that begin at the same worker share it, one after the other in each turn. All parts have turns of the same
    length.
    """
    lengths = {part.per_turn for part in parts}
    if len(lengths) > 1:
        raise ScheduleError(f"parts of a pipeline have turns of {sorted(lengths)} micro-batches: make them alike")
    rows: dict[int, tuple[Action, ...]] = {}
    first = 0
    for part, worker in zip(parts, workers, strict=True):
        for number, actions in enumerate(part.body, start=worker):
            moved = tuple(Action(kind, first + stage, offset) for kind, stage, offset in actions)
            rows[number] = rows.get(number, ()) + moved
        first += part.num_stages
    return Schedule(tuple(rows[number] for number in sorted(rows)), parts[0].per_turn)
