"""What an action waits for, makes and frees: the one meaning of a schedule, for every interpreter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.errors import ScheduleError
from stretto.schedule.action import Action
from stretto.schedule.reach import Reach
from stretto.schedule.schedule import Schedule


class Edge(NamedTuple):
    """One value on its way: what it is, which action made it, which stage uses it.

    ========================  ==================================================================================
    activation                a stage's output, for the stage above; what the loader (stage -1) gives to stage 0
    target                    what the loader gives to every stage with a head
    graph                     what a forward keeps for its backward
    gradient                  what a backward sends to the stage below: one gradient for each stop it carries
    cotangent                 what I keeps for W
    weight-gradient           what U consumes, or R, where there is one
    norm                      how large a stage's gradients are: what R tells every stage's U
    tied-weight               a version of weights that another stage owns
    tied-gradient             what a backward contributes to the gradient of weights that another stage owns
    loss                      the output head's loss, for whoever called (stage S)
    ========================  ==================================================================================
    """

    value: str
    source: Action
    stage: int


SEVERAL = frozenset(
    {"weight-gradient", "norm", "tied-weight", "tied-gradient"}
)  # values that one action may need from several sources


def operands(needs: Iterable[Edge], values: Mapping[Edge, Any]) -> dict[str, Any]:
    """What an action works on, by the values' names; a list in the order of `needs` for those in SEVERAL."""
    given: dict[str, Any] = {}
    for edge in needs:
        if edge.value in SEVERAL:
            given.setdefault(edge.value, []).append(values[edge])
        else:
            given[edge.value] = values[edge]
    return given


class Tie(NamedTuple):
    """Stage `user` works on weights that stage `owner` updates.

    For micro-batch m it gets those that the owner's forward of m saw: `behind[m % len(behind)]` says how many
    micro-batches before m the last one is whose gradient they contain.
    """

    owner: int
    user: int
    behind: tuple[int, ...]

    def newest(self, microbatch: int) -> int:
        """The micro-batch whose update made the weights that a forward sees; below 0: the first weights."""
        return microbatch - self.behind[microbatch % len(self.behind)]


def loaded(microbatch: int) -> Action:
    """The loader's action that brings in a micro-batch: the loader is stage -1."""
    return Action("F", -1, microbatch)


@dataclass(frozen=True)
class Rules:
    """The meaning of actions, from topology given as data. No interpreter holds a rule of its own.

    `split` are the stages whose backward is I and W instead of B; `per_update` is how many micro-batches an update
    consumes; `reduces` says that updates wait for what all stages' R have to tell; `ties` are weights that several
    stages use.
    """

    reach: Reach
    split: frozenset[int] = frozenset()
    per_update: int = 1
    reduces: bool = False
    ties: tuple[Tie, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, reach: Reach, per_update: int | None = None, ties: tuple[Tie, ...] = ()) -> "Rules":
        """The rules of a schedule: which stages split their backward stands in its body."""
        split = frozenset(action.stage for actions in schedule.body for action in actions if action.kind == "I")
        reduces = any(action.kind == "R" for actions in schedule.body for action in actions)
        return cls(reach, split, schedule.per_turn if per_update is None else per_update, reduces, ties)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.reach.num_stages

    def needs(self, action: Action) -> tuple[Edge, ...]:
        """What must be there before `action` can run."""
        kind, stage, microbatch = action
        forward = Action("F", stage, microbatch)
        if kind == "F":
            activation = Edge("activation", Action("F", stage - 1, microbatch), stage)
            borrowed = self._borrowed(stage, microbatch) if self.ties else ()
            if self.reach.hops[stage] is None:
                return (activation, *borrowed)
            return (activation, Edge("target", loaded(microbatch), stage), *borrowed)
        if kind == "B":
            return (Edge("graph", forward, stage), *self._arriving(stage, microbatch))
        if kind == "I":
            passing = self._arriving(stage, microbatch) if self.reach.passing(stage) else ()
            return (Edge("graph", forward, stage), *passing)
        if kind == "W":
            cotangent = Edge("cotangent", Action("I", stage, microbatch), stage)
            return (Edge("graph", forward, stage), cotangent, *self._arriving(stage, microbatch))
        if kind == "U" and self.reduces:
            return tuple(Edge("norm", Action("R", other, microbatch), stage) for other in range(self.num_stages))
        if kind in "RU":
            first = microbatch - self.per_update + 1
            window = range(first, microbatch + 1)
            return (*(self._weight_gradient(stage, m) for m in window), *self._contributed(stage, window))
        raise ScheduleError(f"{action}: no rule for kind {kind!r}")

    def makes(self, action: Action) -> tuple[Edge, ...]:
        """What is there once `action` has run."""
        kind, stage, _ = action
        if kind == "F":
            graph = Edge("graph", action, stage)
            if stage + 1 < self.num_stages:
                return (Edge("activation", action, stage + 1), graph)
            return (graph, Edge("loss", action, stage + 1))
        if kind == "U":
            return tuple(Edge("tied-weight", action, tie.user) for tie in self.ties if tie.owner == stage)
        if kind == "R":
            return tuple(Edge("norm", action, other) for other in range(self.num_stages))
        made: list[Edge] = []
        if kind in "BI" and self.reach.carried(stage):
            made.append(Edge("gradient", action, stage - 1))
        if kind == "I":
            made.append(Edge("cotangent", action, stage))
        if kind in "BW":
            made.append(Edge("weight-gradient", action, stage))
            made += [Edge("tied-gradient", action, tie.owner) for tie in self.ties if tie.user == stage]
        return tuple(made)

    def frees(self, action: Action) -> tuple[Edge, ...]:
        """What nobody needs any more once `action` has run. I keeps everything for its W."""
        return () if action.kind == "I" else self.needs(action)

    def loads(self, microbatch: int) -> tuple[Edge, ...]:
        """What the loader makes when a micro-batch enters."""
        source = loaded(microbatch)
        return (Edge("activation", source, 0), *(Edge("target", source, stage) for stage in self.reach.heads))

    def loss(self, microbatch: int) -> Edge:
        """The output head's loss of a micro-batch."""
        return Edge("loss", Action("F", self.num_stages - 1, microbatch), self.num_stages)

    def _borrowed(self, stage: int, microbatch: int) -> tuple[Edge, ...]:
        # Only the first forward that sees a version needs it to arrive.
        return tuple(
            Edge("tied-weight", Action("U", tie.owner, newest), stage)
            for tie in self.ties
            if tie.user == stage and (newest := tie.newest(microbatch)) >= 0 and newest != tie.newest(microbatch - 1)
        )

    def _contributed(self, stage: int, window: range) -> tuple[Edge, ...]:
        return tuple(
            Edge("tied-gradient", Action("W" if tie.user in self.split else "B", tie.user, m), stage)
            for tie in self.ties
            if tie.owner == stage
            for m in window
        )

    def _arriving(self, stage: int, microbatch: int) -> tuple[Edge, ...]:
        if not self.reach.arriving(stage):
            return ()
        kind = "I" if stage + 1 in self.split else "B"
        return (Edge("gradient", Action(kind, stage + 1, microbatch), stage),)

    def _weight_gradient(self, stage: int, microbatch: int) -> Edge:
        kind = "W" if stage in self.split else "B"
        return Edge("weight-gradient", Action(kind, stage, microbatch), stage)
