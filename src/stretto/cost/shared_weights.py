"""What weights that stages share cost the stages that do not own them, as training runs them.

A stage that borrows a weight computes with a copy of it, which its optimizer does not step: there is no update, no
state, and no sum of gradients. Where its losses train the owner, too, the gradient of each micro-batch goes there; else
its backward computes none. No torch here.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from stretto.cost.layer_table import Affine, Kind, LayerCost, Measured, ModelCosts, TiedLayers
from stretto.schedule import Rules


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
    return replace(
        passes, gradient_bytes=gradients, parameter_tensors=row.parameter_tensors - tensors, measured=measured,
        sent_gradients=passes.sent_gradients + sent,
    )  # fmt: skip


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
    costs: ModelCosts, bounds: Sequence[int], *, last_owns: bool = False, read: Iterable[int] = (),
    readers: Iterable[int] = (),
) -> dict[tuple[int, int], float]:  # fmt: skip
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
