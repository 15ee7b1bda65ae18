"""What auxiliary heads of one kind cost, wherever a plan's stages end.

What weights that stages share cost the stages that do not own them, as training runs them.

A stage that borrows a weight computes with a copy of it, which its optimizer does not step: there is no update, no
state, and no sum of gradients. Where its losses train the owner, too, the gradient of each micro-batch goes there; else
its backward computes none. No torch here.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import NamedTuple

from stretto.cost.layer_table import Affine, Kind, LayerCost, Measured, ModelCosts, TiedLayers
from stretto.schedule import Reach, Rules
from stretto.schedule.even_split import bounds as even_bounds

Copied = Callable[[int, int], Sequence[int]]  # (stage, number of stages) -> the stages that its head copies
Spares = Callable[[int, int], bool]  # (stage, number of stages) -> whether its head does without a part


class StageHeads(NamedTuple):
    """Heads behind the stages of a cut: the row of each stage's, None without one; what stages send each other.

    `weights` are bytes of weights by (owner, user): those that stages share, and those that heads read. `ties` are the
    pairs that share some, `reads` says of those that only read them after how many updates they are sent, as
    `Method.plan` takes both.
    """

    rows: list[LayerCost | None]
    weights: dict[tuple[int, int], float] = {}  # noqa: RUF012 (never changed)
    ties: tuple[tuple[int, int], ...] = ()
    reads: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadCosts:
    """The costs of a kind of head behind each layer, its loss included.

    `rows[l]` is that of a head behind layer l, None where there can be none. A head that `spares` a part of itself
    behind some stages costs `spared_rows[l]` there. One with `copied` consists of copies of whole later stages; then
    `rows` are those of the layers themselves, the last one with the loss, and adapters between shapes are left out.

    `read` are bytes of weights that heads read of the network's last layers, by layer: of the stage that has it, if
    that stands above the head's. `following[l]` are those that a head behind layer l reads of the next stage. Both are
    sent after each `every` updates; if the heads `train` them, as many bytes of gradients go back.
    """

    rows: tuple[LayerCost | None, ...]
    spared_rows: tuple[LayerCost | None, ...] = ()
    spares: Spares | None = None
    copied: Copied | None = None
    read: Mapping[int, float] = field(default_factory=dict)
    following: tuple[float, ...] = ()
    every: int = 1
    trains: bool = False
    _known: dict[Hashable, list[LayerCost | None]] = field(default_factory=dict, repr=False, compare=False)

    def variant(self, stage: int, stages: int) -> Hashable:
        """What the rows behind a stage depend on, beside its last layer."""
        if self.copied is not None:
            return stages - stage, tuple(copied - stage for copied in self.copied(stage, stages))
        return self.spares is not None and self.spares(stage, stages)

    def behind(self, stage: int, stages: int) -> list[LayerCost | None]:
        """The costs behind each layer as the last one of a stage. Of copies: with equally long stages above it."""
        key = self.variant(stage, stages)
        if key not in self._known:
            if self.copied is None:
                self._known[key] = list(self.spared_rows if key else self.rows)
            else:
                layers, above = len(self.rows), stages - 1 - stage
                self._known[key] = [
                    self._copies(stage, [*[0] * (stage + 1), *equal_stages(end, layers, above)])
                    if layers - end >= above
                    else None
                    for end in range(1, layers + 1)
                ]
        return self._known[key]

    def at(self, stage: int, bounds: Sequence[int]) -> LayerCost | None:
        """The costs behind a stage, where stage s holds the layers from bounds[s] up to bounds[s + 1]."""
        if self.copied is not None:
            return self._copies(stage, bounds)
        return self.behind(stage, len(bounds) - 1)[bounds[stage + 1] - 1]

    def laid_out(
        self, heads: Sequence[int], costs: ModelCosts, bounds: Sequence[int], *, last_owns: bool
    ) -> StageHeads:
        """The heads behind these stages of a cut, where stage s holds the layers from bounds[s] up to bounds[s + 1].

        `last_owns`: weights that stages share belong to the last of them.
        """
        rows = [self.at(stage, bounds) if stage in heads else None for stage in range(len(bounds) - 1)]
        read = self.weights_read(bounds, heads, costs)
        borrowing = {"read": self.read, "readers": heads} if self.trains else {}
        tied = tied_bytes(costs, bounds, last_owns=last_owns, **borrowing)
        weights = {pair: tied.get(pair, 0.0) + read.get(pair, 0.0) for pair in sorted({*tied, *read})}
        if self.trains:
            rows = [
                None if row is None else without_twice(row, self.twice(costs, bounds[s], bounds[s + 1]))
                for s, row in enumerate(rows)
            ]
            return StageHeads(rows, weights, ties=tuple(weights))
        return StageHeads(rows, weights, tuple(tied), reads=tuple((*pair, self.every) for pair in read))

    def twice(self, costs: ModelCosts, start: int, stop: int) -> float:
        """Bytes of weights that the layers from `start` up to `stop` share with layers above that their head reads."""
        return sum(
            tie.bytes
            for tie in costs.ties
            if any(start <= layer < stop for layer in tie.layers)
            and any(layer >= stop for layer in {*self.read} & {*tie.layers})
        )

    def _copies(self, stage: int, bounds: Sequence[int]) -> LayerCost | None:
        assert self.copied is not None
        copied = self.copied(stage, len(bounds) - 1)
        rows = [row for each in copied for row in self.rows[bounds[each] : bounds[each + 1]]]
        known = [row for row in rows if row is not None]
        return reduce(LayerCost.then, known) if known else None

    def weights_read(
        self, bounds: Sequence[int], heads: Sequence[int], costs: ModelCosts
    ) -> dict[tuple[int, int], float]:
        """Bytes of the weights that heads behind these stages read of other stages, by (owner, reader).

        Weights that heads train and that several layers share are left out: `tied_bytes` has them.
        """
        shared = dict.fromkeys(self.read, 0.0)
        for tie in costs.ties if self.trains else ():
            for layer in {*self.read} & {*tie.layers}:
                shared[layer] += tie.bytes
        found: dict[tuple[int, int], float] = {}
        for reader in heads:
            for layer, num_bytes in self.read.items():
                owner = bisect_right(bounds, layer) - 1
                if owner > reader and num_bytes > shared[layer]:
                    found[owner, reader] = found.get((owner, reader), 0.0) + num_bytes - shared[layer]
            if self.following and self.following[bounds[reader + 1] - 1]:
                found[reader + 1, reader] = self.following[bounds[reader + 1] - 1]
        return dict(sorted(found.items()))


def laid_out(
    heads: Sequence[LayerCost | None] | HeadCosts | None, reach: Reach, costs: ModelCosts, bounds: Sequence[int]
) -> StageHeads:
    """The heads behind the stages of a cut, and the weights that stages share, where gradients reach so far."""
    if isinstance(heads, HeadCosts):
        behind = sorted({*reach.heads[:-1], *reach.predicted})
        local = len(reach.heads) > 1 and reach.stop(reach.num_stages - 1) != 0  # else the output's loss trains all
        return heads.laid_out(behind, costs, bounds, last_owns=local)
    tied = tied_bytes(costs, bounds)
    return StageHeads([None] * (len(bounds) - 1) if heads is None else list(heads), tied, tuple(tied))


def without_twice(row: LayerCost, num_bytes: float) -> LayerCost:
    """A head without so many bytes of weights that its stage has, too, nor the gradient, which is one."""
    if not num_bytes:
        return row
    numbers = round(num_bytes * row.parameters / row.parameter_bytes)
    return replace(
        row,
        parameters=row.parameters - numbers,
        parameter_bytes=row.parameter_bytes - num_bytes,
        activation=row.activation - Affine(num_bytes),
    )


def equal_stages(start: int, stop: int, count: int) -> list[int]:
    """The bounds of `count` equally long stages of the layers from `start` up to `stop`."""
    return [*(start + even_bounds(stop - start, part, count)[0] for part in range(count)), stop]


class SharedUse(NamedTuple):
    """Layers of one stage that use weights which another stage owns: those that all the layers `shared` have.

    They send gradients to the owner if they `train` them, else they only read them.
    """

    shared: tuple[int, ...]
    layers: tuple[int, ...]
    trains: bool


def uses_in(costs: ModelCosts, bounds: Sequence[int], rules: Rules, *, copies: bool = False) -> tuple[SharedUse, ...]:
    """The uses of borrowed weights by the stages of a cut.

    Stage s holds the layers from bounds[s] up to bounds[s + 1]. `copies` says that under methods with a single loss
    each stage steps a copy of its own, as systems for large models have it; then they borrow nothing.
    """
    if copies and len(rules.reach.heads) == 1 and not rules.reach.predicted:
        return ()
    trains = {(tie.owner, tie.user): tie.trains for tie in rules.ties}
    found = []
    for shared in dict.fromkeys(tie.layers for tie in costs.ties):
        layers_of: dict[int, list[int]] = {}
        for layer in sorted(shared):
            layers_of.setdefault(bisect_right(bounds, layer) - 1, []).append(layer)
        first, last = min(layers_of), max(layers_of)
        owner = last if trains.get((last, first)) else first
        found += [
            SharedUse(shared, tuple(layers), trains[owner, user]) for user, layers in layers_of.items() if user != owner
        ]
    return tuple(found)


def borrow(costs: ModelCosts, uses: Iterable[SharedUse]) -> ModelCosts:
    """The costs where layers borrow weights: what their rows have of updates, state and sums of gradients is gone.

    A use that trains has the gradient that each backward sends beside (`LayerCost.sent_gradients`). Costs without
    weights that those layers share stay as they are.
    """
    of_layer: dict[int, list[tuple[SharedUse, TiedLayers]]] = {}
    rows, reading, ties = list(costs.layers), dict(costs.read_rows), list[TiedLayers]()
    uses = tuple(uses)
    for tie in costs.ties:
        of_tie = [use for use in uses if use.shared == tie.layers]
        elsewhere = {layer for use in of_tie for layer in use.layers}
        ties += [TiedLayers(use.layers, tie.bytes, borrowed=True) for use in of_tie]
        ties.append(replace(tie, layers=tuple(layer for layer in tie.layers if layer not in elsewhere)))
        for use in of_tie:
            for layer in use.layers:
                of_layer.setdefault(layer, []).append((use, tie))
    for layer, own in of_layer.items():
        having = sum(layer in tie.layers for tie in costs.ties)
        only_read = len(own) == having and not any(use.trains for use, _ in own)
        num_bytes = sum(tie.bytes for _, tie in own)
        sent = sum(tie.bytes for use, tie in own if use.trains and layer == min(use.layers))
        read = reading.get(layer) if only_read else None
        rows[layer] = not_stepped(rows[layer], num_bytes, len(own), sent, read)
    return replace(costs, layers=tuple(rows), ties=tuple(tie for tie in ties if tie.layers))


def not_stepped(row: LayerCost, num_bytes: float, tensors: int, sent: float, read: LayerCost | None) -> LayerCost:
    """A layer without the step of so many bytes of its weights, in so many tensors.

    `sent` are bytes of gradients that go to their owner. `read` is the row of the layer if it only reads them.
    """
    gradients = row.gradient_bytes - num_bytes
    passes = row if read is None else replace(read, name=row.name)
    measured = None if row.measured is None else without_step(row.measured, row, passes, gradients)
    sent, tensors = passes.sent_gradients + sent, row.parameter_tensors - tensors
    return replace(passes, gradient_bytes=gradients, parameter_tensors=tensors, measured=measured, sent_gradients=sent)


def without_step(measured: Measured, row: LayerCost, passes: LayerCost, gradients: float) -> Measured:
    """Measured times of a layer with fewer gradients: of updates and sums a share by bytes, of passes one by FLOPs."""
    stepped = gradients / row.gradient_bytes if row.gradient_bytes else 0.0

    def shortened(line: Affine, kind: Kind) -> Affine:
        whole, part = row.flops(kind).each, passes.flops(kind).each
        return Affine(line.fixed * part / whole, line.each * part / whole) if whole else line

    weights = measured.weight_gradient
    return replace(
        measured,
        backward=shortened(measured.backward, "B"),
        weight_gradient=None if weights is None else shortened(weights, "W"),
        update=None if measured.update is None else measured.update * stepped,
        accumulate=None if measured.accumulate is None else measured.accumulate * stepped,
    )


def tied_bytes(
    costs: ModelCosts,
    bounds: Sequence[int],
    *,
    last_owns: bool = False,
    read: Iterable[int] = (),
    readers: Iterable[int] = (),
) -> dict[tuple[int, int], float]:
    """Bytes of shared weights that one stage sends another, by (owner, user).

    The first stage that uses a weight owns it; with `last_owns` the last one. The heads behind the stages `readers`
    borrow the weights of the layers `read` that are above them.
    """
    sent: dict[tuple[int, int], float] = {}
    for tie in costs.ties:
        stages = {layer: bisect_right(bounds, layer) - 1 for layer in tie.layers}
        users = {*stages.values()}
        users |= {reader for reader in readers for layer in {*read} & {*tie.layers} if stages[layer] > reader}
        owner = max(stages.values()) if last_owns else min(stages.values())
        for user in users - {owner}:
            sent[owner, user] = sent.get((owner, user), 0.0) + tie.bytes
    return dict(sorted(sent.items()))
