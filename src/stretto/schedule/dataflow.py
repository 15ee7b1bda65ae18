"""What an action waits for, makes and frees: the one meaning of a schedule, for every interpreter."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from stretto.errors import ScheduleError
from stretto.options.checks import of_kind, sequence, whole
from stretto.schedule.action import Action
from stretto.schedule.reach import Reach
from stretto.schedule.schedule import Schedule


class Edge(NamedTuple):
    """One value on its way: its kind, the action that made it, the stage that uses it.

    ========================  ==================================================================================
    activation                a stage's output, for the stage above; stage 0 gets the loader's (stage -1)
    target                    from the loader to every stage with a head, or with a prediction that reads it
    graph                     kept by a forward (or its recompute) for its backward
    input                     kept by a forward instead of a graph, where a segment begins: for its recompute
    version                   which weights a forward without a graph saw: for its recompute
    recomputed                a stage's output once more, for the recompute of the stage above
    gradient                  from a backward to the stage below: one gradient for each stop it carries
    cotangent                 kept by I for W
    prediction                kept by a backward with a predicted gradient for L
    weight-gradient           consumed by U, or R, or A, where there is one
    summed                    a mark that the replicas' gradients have been added up: for R, or U
    norm                      the norms of a stage's gradients, from R to every stage's U
    tied-weight               a version of weights that another stage owns
    tied-gradient             a backward's part of the gradient of weights that another stage owns
    loss                      the output head's loss, for the caller (stage S)
    ========================  ==================================================================================
    """

    value: str
    source: Action
    stage: int


new = tuple.__new__  # a NamedTuple's own constructor takes four times as long, and every action needs several

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

    For micro-batch m it gets the version that the owner's forward of m saw; the last gradient in it is that of the
    micro-batch `behind[m % len(behind)]` before m. If the user `trains` the weights, its gradients go to the owner.
    Else it only reads them, and only the version after each `every` micro-batches is sent. An owner above its user is
    the last stage that has the weights: its versions travel down, against the activations (`Delays.reading`).
    """

    owner: int
    user: int
    behind: tuple[int, ...]
    trains: bool = True
    every: int = 1

    @property
    def shares(self) -> bool:
        """Whether both stages have one parameter; else the user has a copy, in a head."""
        return self.trains or self.owner < self.user

    def sends(self, microbatch: int) -> bool:
        """Whether the owner's update after a micro-batch is sent."""
        return (microbatch + 1) % self.every == 0

    def newest(self, microbatch: int) -> int:
        """The micro-batch whose update made the weights that a forward sees; below 0: the first weights."""
        return microbatch - self.behind[microbatch % len(self.behind)]


class Flow(NamedTuple):
    """The values that an action needs, makes, and frees: no later action needs the last."""

    needs: tuple[Edge, ...]
    makes: tuple[Edge, ...]
    frees: tuple[Edge, ...]


def loaded(microbatch: int) -> Action:
    """The loader's action that brings in a micro-batch: the loader is stage -1."""
    return Action("F", -1, microbatch)


@dataclass(frozen=True)
class Rules:
    """The meaning of actions, from topology given as data. No interpreter holds a rule of its own.

    `split` are the stages whose backward is I and W instead of B, but for the (stage, offset in a turn of `per_turn`
    micro-batches) in `whole`; `per_update` is how many micro-batches an update consumes. `recompute` are the stages
    whose graph is made by a second forward, C; `keep` those of them that keep their input for it, the first of each
    segment: the others get it from the C of the stage below. With `reduces`, updates wait for the norms from all
    stages' R; with `sums`, the replicas' gradients are added up before an update, with `merges` their weights are
    merged after it; `ties` are weights that several stages use.
    """

    reach: Reach
    split: frozenset[int] = frozenset()
    per_update: int = 1
    recompute: frozenset[int] = frozenset()
    keep: frozenset[int] = frozenset()
    reduces: bool = False
    sums: bool = False
    merges: bool = False
    ties: tuple[Tie, ...] = ()
    whole: frozenset[tuple[int, int]] = frozenset()
    per_turn: int = 1
    _patterns: dict[tuple[str, int, int], Flow] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, schedule: Schedule, reach: Reach, per_update: int | None = None, ties: tuple[Tie, ...] = ()) -> "Rules":
        """The rules of a schedule. Which stages split the backward, recompute or reduce is read off its body."""
        of_kind("schedule", schedule, Schedule, "a stretto.schedule.Schedule")
        of_kind("reach", reach, Reach, "a stretto.schedule.Reach")
        if per_update is not None:
            whole("per_update", per_update, 1)
        sequence("ties", ties, "a tuple of Tie, such as Delays.tie(owner, user) makes")
        for tie in ties:
            of_kind("a tie", tie, Tie, "what Delays.tie(owner, user) makes")
        kinds = {(action.kind, action.stage) for actions in schedule.body for action in actions}
        recompute, keep = segments_of(schedule)
        split = frozenset(stage for kind, stage in kinds if kind == "I")
        if both := sorted(split & reach.predicted):
            raise ScheduleError(f"stage {both[0]} has a predicted gradient: its backward is B, not I and W")
        return cls(
            reach,
            split=split,
            per_update=schedule.per_turn if per_update is None else per_update,
            recompute=recompute,
            keep=keep,
            reduces=any(kind == "R" for kind, _ in kinds),
            sums=any(kind == "A" for kind, _ in kinds),
            merges=any(kind == "M" for kind, _ in kinds),
            ties=ties,
            whole=whole_backwards(schedule, split),
            per_turn=schedule.per_turn,
        )

    @cached_property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.reach.num_stages

    def splits(self, stage: int, microbatch: int) -> bool:
        """Whether a stage's backward of a micro-batch is I and W."""
        return stage in self.split and (stage, microbatch % self.per_turn) not in self.whole

    def sweeps_are_possible(self, stage: int) -> bool:
        """Whether each whole backward of a stage, if it has any, can be one sweep."""
        is_split = stage in self.split and all(other != stage for other, _ in self.whole)
        return is_split or self.reach.one_sweep(stage)

    def kinds(self, stage: int, microbatch: int) -> str:
        """The kinds of a stage's actions for one micro-batch, of which some are the last of an update."""
        ends = "A" * self.sums + "R" * self.reduces + "U" + "M" * self.merges
        runs = ("FC" if stage in self.recompute else "F") + ("IW" if self.splits(stage, microbatch) else "B")
        runs += "L" * (stage in self.reach.predicted)
        return runs + ends * ((microbatch + 1) % self.per_update == 0)

    @property
    def lookback(self) -> int:
        """The most micro-batches between an update and a forward on a stage below it, or one that only reads them."""
        return max((max(t.behind) + t.every for t in self.ties if not t.trains or t.owner > t.user), default=0)

    def needs(self, action: Action) -> tuple[Edge, ...]:
        """The values that `action` needs before it can run."""
        return self._needs(action) if self.ties else self.flow(action).needs

    def makes(self, action: Action) -> tuple[Edge, ...]:
        """The values that `action` makes."""
        return self._makes(action) if self.ties else self.flow(action).makes

    def flow(self, action: Action, since: int | None = None) -> Flow:
        """What `action` needs, makes and frees; without values made before micro-batch `since`, if given.

        Only tied weights may be older than a drain, and the drain has settled them.
        """
        kind, stage, microbatch = action
        if self.ties:
            needs = tuple([edge for edge in self._needs(action) if since is None or edge.source.microbatch >= since])
            return Flow(needs, self._makes(action), self.frees(action, needs))
        # Micro-batches are alike, or those at one offset of a turn: the pattern is that of the first, moved on.
        first = microbatch % self.per_turn if self.whole else 0
        pattern = self._patterns.get((kind, stage, first))
        if pattern is None:
            example = Action(kind, stage, first)
            needs = self._needs(example)
            pattern = self._patterns[kind, stage, first] = Flow(needs, self._makes(example), self.frees(example, needs))
        later = microbatch - first
        moved = [
            new(Edge, (value, new(Action, (k, s, m + later)), user))
            for value, (k, s, m), user in pattern.needs + pattern.makes
        ]
        count = len(pattern.needs)
        needs = tuple(moved[:count])
        frees = needs if pattern.frees == pattern.needs else self.frees(action, needs)
        return new(Flow, (needs, tuple(moved[count:]), frees))

    def _needs(self, action: Action) -> tuple[Edge, ...]:
        kind, stage, microbatch = action
        forward = Action("F", stage, microbatch)
        if kind == "F":
            activation = Edge("activation", Action("F", stage - 1, microbatch), stage)
            borrowed = self._borrowed(stage, microbatch) if self.ties else ()
            return (activation, *self._target(stage, microbatch), *borrowed)
        if kind == "C":
            below = Edge("recomputed", Action("C", stage - 1, microbatch), stage)
            given = Edge("input", forward, stage) if stage in self.keep else below
            return (given, Edge("version", forward, stage), *self._target(stage, microbatch))
        if kind == "L":
            return (Edge("prediction", Action("B", stage, microbatch), stage), *self._arriving(stage, microbatch))
        graph = Edge("graph", forward._replace(kind="C") if stage in self.recompute else forward, stage)
        if kind == "B" and stage in self.reach.predicted:
            return (graph, *[Edge("target", loaded(microbatch), stage)] * self.reach.labelled)
        if kind == "B":
            return (graph, *self._arriving(stage, microbatch))
        if kind == "I":
            passing = self._arriving(stage, microbatch) if self.reach.passing(stage) else ()
            return (graph, *passing)
        if kind == "W":
            cotangent = Edge("cotangent", Action("I", stage, microbatch), stage)
            return (graph, cotangent, *self._arriving(stage, microbatch))
        if kind == "U" and self.reduces:
            return tuple(Edge("norm", Action("R", other, microbatch), stage) for other in range(self.num_stages))
        if kind in "RU" and self.sums:
            return (Edge("summed", action._replace(kind="A"), stage),)
        if kind in "ARU":
            first = microbatch - self.per_update + 1
            window = range(first, microbatch + 1)
            return (*(self._weight_gradient(stage, m) for m in window), *self._contributed(stage, window))
        if kind == "M":
            return ()
        raise ScheduleError(f"{action}: no rule for kind {kind!r}")

    def _makes(self, action: Action) -> tuple[Edge, ...]:
        kind, stage, _ = action
        if kind == "F":
            kept = [value for value, of in (("input", self.keep), ("version", self.recompute)) if stage in of]
            up = "activation" if stage + 1 < self.num_stages else "loss"
            return (Edge(up, action, stage + 1), *(Edge(value, action, stage) for value in kept or ["graph"]))
        if kind == "C":
            goes_on = stage + 1 in self.recompute - self.keep
            return (*[Edge("recomputed", action, stage + 1)] * goes_on, Edge("graph", action, stage))
        if kind == "U":
            return tuple(
                Edge("tied-weight", action, tie.user)
                for tie in self.ties
                if tie.owner == stage and tie.sends(action.microbatch)
            )
        if kind == "A":
            return (Edge("summed", action, stage),)
        if kind == "R":
            return tuple(Edge("norm", action, other) for other in range(self.num_stages))
        made: list[Edge] = []
        if kind in "BI" and self.reach.carried(stage):
            made.append(Edge("gradient", action, stage - 1))
        if kind == "I":
            made.append(Edge("cotangent", action, stage))
        if kind == "B" and stage in self.reach.predicted:
            made.append(Edge("prediction", action, stage))
        if kind in "BW":
            made.append(Edge("weight-gradient", action, stage))
            made += [Edge("tied-gradient", action, tie.owner) for tie in self.ties if tie.user == stage and tie.trains]
        return tuple(made)

    def frees(self, action: Action, needs: tuple[Edge, ...] | None = None) -> tuple[Edge, ...]:
        """The values among `needs` (all that `action` needs, if None) that no later action needs.

        I frees nothing, since its W needs the same values; F keeps its target for its C.
        """
        if action.kind == "I":
            return ()
        needs = self.needs(action) if needs is None else needs
        if action.kind == "F" and action.stage in self.recompute:
            return tuple(edge for edge in needs if edge.value != "target")
        return needs

    def loads(self, microbatch: int) -> tuple[Edge, ...]:
        """The values that the loader makes when a micro-batch enters."""
        source = new(Action, ("F", -1, microbatch))
        return (new(Edge, ("activation", source, 0)), *[Edge("target", source, stage) for stage in self.reach.reading])

    def loss(self, microbatch: int) -> Edge:
        """The output head's loss of a micro-batch."""
        stages = self.num_stages
        return new(Edge, ("loss", new(Action, ("F", stages - 1, microbatch)), stages))

    def _borrowed(self, stage: int, microbatch: int) -> tuple[Edge, ...]:
        # Only the first forward that sees a version needs it to arrive.
        return tuple(
            Edge("tied-weight", Action("U", tie.owner, newest), stage)
            for tie in self.ties
            if tie.user == stage and (newest := tie.newest(microbatch)) >= 0 and newest != tie.newest(microbatch - 1)
        )

    def _contributed(self, stage: int, window: range) -> tuple[Edge, ...]:
        return tuple(
            Edge("tied-gradient", Action("W" if self.splits(tie.user, m) else "B", tie.user, m), stage)
            for tie in self.ties
            if tie.owner == stage and tie.trains
            for m in window
        )

    def _target(self, stage: int, microbatch: int) -> tuple[Edge, ...]:
        return () if self.reach.hops[stage] is None else (Edge("target", loaded(microbatch), stage),)

    def _arriving(self, stage: int, microbatch: int) -> tuple[Edge, ...]:
        if not self.reach.arriving(stage):
            return ()
        kind = "I" if self.splits(stage + 1, microbatch) else "B"
        return (Edge("gradient", Action(kind, stage + 1, microbatch), stage),)

    def _weight_gradient(self, stage: int, microbatch: int) -> Edge:
        kind = "W" if self.splits(stage, microbatch) else "B"
        return Edge("weight-gradient", Action(kind, stage, microbatch), stage)


def whole_backwards(schedule: Schedule, split: frozenset[int]) -> frozenset[tuple[int, int]]:
    """The (stage, offset in a turn) of each B, and no I, of stages that split other backwards."""
    offsets: dict[str, set[tuple[int, int]]] = {"B": set(), "I": set()}
    for stage in split:
        for kind, _, microbatch in schedule.of_stage(stage):
            if kind in offsets:
                offsets[kind].add((stage, microbatch % schedule.per_turn))
    return frozenset(offsets["B"] - offsets["I"])


def segments_of(schedule: Schedule) -> tuple[frozenset[int], frozenset[int]]:
    """The stages that recompute, and the first stage of each segment.

    A segment ends at a stage whose backward follows its recompute at once: the stages above it are in another segment.
    """
    recompute, ends = set(), set()
    for stage in range(schedule.num_stages):
        order = schedule.of_stage(stage)
        for action, following in pairwise(order):
            if action.kind == "C":
                recompute.add(stage)
                if following.kind in "BI" and following.microbatch == action.microbatch:
                    ends.add(stage)
    return frozenset(recompute), frozenset(s for s in recompute if s - 1 not in recompute or s - 1 in ends)
