"""What layers cost when several processes share each of them: tensor cuts weights and work, space cuts images."""

from collections.abc import Sequence
from dataclasses import replace

from stretto.cost.cluster import Link
from stretto.cost.layer_table import Affine, LayerCost, Measured, Work, Works


def by_tensor(layer: LayerCost, parts: int) -> LayerCost:
    """A process's part of a layer whose weights are cut in `parts`; its input and output stay whole."""
    if parts == 1 or not layer.parameters:
        return layer
    inside = layer.activation - layer.shared
    done = {key: works(getattr(layer, key), parts, fixed=True) for key in PASSES}
    return replace(
        layer,
        **done,  # type: ignore[arg-type]
        parameters=layer.parameters // parts,
        parameter_bytes=layer.parameter_bytes / parts,
        gradient_bytes=layer.gradient_bytes / parts,
        activation=layer.shared + scaled(inside, parts, fixed=True),
        measured=measured(layer.measured, parts, fixed=True),
    )


def by_space(layer: LayerCost, parts: int, side: int) -> LayerCost:
    """A process's slab of a layer that takes an image of `side` rows; its weights stay whole."""
    if parts == 1 or not side:
        return layer
    done = {key: works(getattr(layer, key), parts, fixed=False) for key in PASSES}
    kept = {key: scaled(getattr(layer, key), parts, fixed=False) for key in SIZES}
    return replace(
        layer,
        **done,  # type: ignore[arg-type]
        **kept,  # type: ignore[arg-type]
        measured=measured(layer.measured, parts, fixed=False),
    )


PASSES = ("forward", "backward", "input_gradient", "weight_gradient")
SIZES = ("activation", "shared", "input", "output", "loose_input", "loose_output")


def works(passes: Works, parts: int, *, fixed: bool) -> Works:
    """A part of what operators do; how often they are called stays."""
    return tuple(
        Work(w.operator, w.calls, scaled(w.flops, parts, fixed=fixed), scaled(w.bytes, parts, fixed=fixed))
        for w in passes
    )


def scaled(amount: Affine, parts: int, *, fixed: bool) -> Affine:
    """A part of what grows with the examples, and of the rest if that is cut too."""
    return Affine(amount.fixed / parts if fixed else amount.fixed, amount.each / parts)


def measured(times: Measured | None, parts: int, *, fixed: bool) -> Measured | None:
    """Measured times: what does not grow with the examples is starting operators, which every part does."""
    if times is None:
        return None

    def part(line: Affine | None) -> Affine | None:
        return None if line is None else Affine(line.fixed, line.each / parts)

    return Measured(
        Affine(times.forward.fixed, times.forward.each / parts),
        Affine(times.backward.fixed, times.backward.each / parts),
        part(times.input_gradient),
        part(times.weight_gradient),
        times.update if times.update is None or not fixed else times.update / parts,
        times.residual,
    )


def sums_of(layer: LayerCost) -> int:
    """All-reduces of a layer cut by its weights in a forward: one a pair of cut operators (Shoeybi et al. 2019).

    A block has two, one behind attention and one behind its MLP; another layer with weights one.
    """
    if not layer.parameters:
        return 0
    return 2 if any(work.operator == "attention" for work in layer.forward) else 1


def halo_seconds(
    layers: Sequence[LayerCost], sides: Sequence[int], space: tuple[int, int], links: Sequence[Link], examples: float
) -> list[float]:
    """Of each layer the rows and columns that it takes from both neighbours: one each (3 x 3 kernels), in turn."""
    link = max(links, key=lambda each: each.seconds(1e6))
    height, width = space
    found = []
    for layer, side in zip(layers, sides, strict=True):
        calls = sum(work.calls for work in layer.forward if work.operator in HALOS) if side else 0
        rows = [across for parts, across in ((height, width), (width, height)) if parts > 1]
        size = layer.input.at(examples) / side if side else 0.0
        found.append(sum(2 * calls * link.seconds(size / across) for across in rows))
    return found


HALOS = ("convolution", "pooling")


def shared(layers: Sequence[LayerCost], tensor: int, space: tuple[int, int], sides: Sequence[int]) -> list[LayerCost]:
    """Each process's part of all layers."""
    slabs = space[0] * space[1]
    return [by_space(by_tensor(layer, tensor), slabs, side) for layer, side in zip(layers, sides, strict=True)]
