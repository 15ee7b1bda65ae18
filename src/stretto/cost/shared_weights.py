"""What weights that stages share cost the stages that do not own them: local methods, as training runs them.

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


class Use(NamedTuple):
    """Layers of one stage that use a weight which another stage owns: `ModelCosts.ties[tie]`.

    They send gradients to the owner if they `train` it, else they only read it.
    """

    tie: int
    layers: tuple[int, ...]
    trains: bool


def uses_in(costs: ModelCosts, bounds: Sequence[int], rules: Rules) -> tuple[Use, ...]:
    """The uses of borrowed weights by the stages of a cut; none under methods with a single loss.

    Stage s holds the layers from bounds[s] up to bounds[s + 1].
    """
    if len(rules.reach.heads) == 1:  # their stages are priced as owners; see docs/design.md, "Tied weights"
        return ()
    trains = {(tie.owner, tie.user): tie.trains for tie in rules.ties}
    found = []
    for index, tie in enumerate(costs.ties):
        layers_of: dict[int, list[int]] = {}
        for layer in sorted(tie.layers):
            layers_of.setdefault(bisect_right(bounds, layer) - 1, []).append(layer)
        first, last = min(layers_of), max(layers_of)
        owner = last if trains.get((last, first)) else first
        found += [
            Use(index, tuple(layers), trains[owner, user]) for user, layers in layers_of.items() if user != owner
        ]
    return tuple(found)


def borrow(costs: ModelCosts, uses: Iterable[Use]) -> ModelCosts:
    """The costs where layers borrow weights: what their rows have of updates, state and sums of gradients is gone.

    The gradient that a use sends counts as kept by the forward, as it is there when the backward's memory is at its
    peak.
    """
    rows, ties, uses = list(costs.layers), list(costs.ties), tuple(uses)
    if not uses:
        return costs
    reading, borrowed = dict(costs.read_rows), set[tuple[int, int]]()
    for use in uses:
        tie = costs.ties[use.tie]
        borrowed |= {(use.tie, layer) for layer in use.layers}
        ties[use.tie] = replace(ties[use.tie], layers=tuple(x for x in ties[use.tie].layers if x not in use.layers))
        ties.append(TiedLayers(use.layers, tie.bytes, borrowed=True))
    for layer in dict.fromkeys(layer for use in uses for layer in use.layers):
        having = [index for index, tie in enumerate(costs.ties) if layer in tie.layers]
        own = [use for use in uses if layer in use.layers]
        only_read = not any(use.trains for use in own) and all((index, layer) in borrowed for index in having)
        sent = sum(costs.ties[use.tie].bytes for use in own if use.trains and layer == min(use.layers))
        rows[layer] = not_stepped(
            rows[layer], sum(costs.ties[use.tie].bytes for use in own), len(own), sent,
            reading.get(layer) if only_read else None,
        )  # fmt: skip
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
        activation=passes.activation + Affine(sent),
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
