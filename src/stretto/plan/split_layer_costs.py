"""The costs of layers that several processes share: tensor divides weights and work, space divides images.

What processes with slabs of images send each other, in pixels: the very boxes that `parallel.space` sends.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from stretto.cost.cluster import Link
from stretto.cost.collective import HALO
from stretto.cost.layer_table import KERNEL_AMOUNTS, Affine, ImageWindow, Kernels, LayerCost, Measured, Work, Works
from stretto.parallel.space.geometry import RowRange, SlidingWindow, Window, cuts, want
from stretto.parallel.space.halo import AxisRows, axis_rows, route

Divide = Callable[[Works], Works]


def dividing(parts: int, *, fixed: bool) -> Divide:
    """`part_of_works`, whose result is the same object for the same one, so that equal layers are priced once."""
    known: dict[int, tuple[Works, Works]] = {}

    def divide(passes: Works) -> Works:
        if id(passes) not in known:
            known[id(passes)] = passes, part_of_works(passes, parts, fixed=fixed)
        return known[id(passes)][1]

    return divide


def by_tensor(layer: LayerCost, parts: int, divide: Divide) -> LayerCost:
    """The cost of one process's part of a layer whose weights are divided in `parts`; input and output stay whole."""
    if parts == 1 or not layer.parameters:
        return layer
    inside = layer.activation - layer.shared
    passes = {key: divide(getattr(layer, key)) for key in PASSES}
    return replace(
        layer,
        **passes,  # type: ignore[arg-type]
        parameters=layer.parameters // parts,
        parameter_bytes=layer.parameter_bytes / parts,
        gradient_bytes=layer.gradient_bytes / parts,
        sent_gradients=layer.sent_gradients / parts,
        activation=layer.shared + part_of_amount(inside, parts, fixed=True),
        recomputed=part_of_amount(layer.recomputed, parts, fixed=True),
        measured=part_of_times(layer.measured, parts, fixed=True),
    )


def by_space(layer: LayerCost, parts: int, side: int, divide: Divide | None = None) -> LayerCost:
    """The cost of one process's slab of a layer whose input image has `side` rows; weights stay whole."""
    if parts == 1 or not side:
        return layer
    divide = divide or dividing(parts, fixed=False)
    passes = {key: divide(getattr(layer, key)) for key in PASSES}
    sizes = {key: part_of_amount(getattr(layer, key), parts, fixed=False) for key in SIZES}
    return replace(
        layer,
        **passes,  # type: ignore[arg-type]
        **sizes,  # type: ignore[arg-type]
        forward_exchanges=part_of_exchanges(layer.forward_exchanges, parts),
        backward_exchanges=part_of_exchanges(layer.backward_exchanges, parts),
        measured=part_of_times(layer.measured, parts, fixed=False),
    )


PASSES = ("forward", "backward", "input_gradient", "weight_gradient")
SIZES = ("activation", "shared", "input", "output", "loose_input", "loose_output", "recomputed")


def part_of_works(passes: Works, parts: int, *, fixed: bool) -> Works:
    """One part of a pass's work; each part calls every operator. A product's columns are divided, else its rows."""

    def part(amount: Affine) -> Affine:
        return part_of_amount(amount, parts, fixed=fixed)

    def kernels(each: Kernels) -> Kernels:
        sizes = each.product
        if sizes is not None:
            columns = Affine(sizes.columns.fixed / parts, sizes.columns.each / parts)
            rows = Affine(sizes.rows.fixed, sizes.rows.each / parts)
            sizes = replace(sizes, columns=columns) if fixed else replace(sizes, rows=rows)
        amounts: dict[str, Any] = {key: part(getattr(each, key)) for key in KERNEL_AMOUNTS}
        return replace(each, product=sizes, blocks=-(-each.blocks // parts) if fixed else each.blocks, **amounts)

    return tuple(
        Work(w.operator, w.calls, part(w.flops), part(w.bytes), tuple(map(kernels, w.kernels))) for w in passes
    )


def part_of_exchanges(exchanges: Works | None, parts: int) -> Works | None:
    """What processes with the same slab exchange: one part of each activation."""
    return None if exchanges is None else part_of_works(exchanges, parts, fixed=False)


def part_of_amount(amount: Affine, parts: int, *, fixed: bool) -> Affine:
    """One part of an amount: of its growth with examples, and of its fixed term if `fixed`."""
    return Affine(amount.fixed / parts if fixed else amount.fixed, amount.each / parts)


def part_of_times(times: Measured | None, parts: int, *, fixed: bool) -> Measured | None:
    """One part of measured times; the fixed terms are the starts of operators, which every part has."""
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
        times.accumulate,
        times.residual,
        times.crowded,
        times.contention,
    )


def num_all_reduces_of(layer: LayerCost) -> int:
    """The number of all-reduces in the forward of a layer under tensor parallelism (Shoeybi et al. 2019).

    A block has two, one behind attention and one behind its MLP; another layer with weights one.
    """
    if not layer.parameters:
        return 0
    return 2 if any(work.operator == "attention" for work in layer.forward) else 1


def halo_seconds(
    layers: Sequence[LayerCost], sides: Sequence[int], space: tuple[int, int], links: Sequence[Link], examples: float
) -> tuple[list[float], list[float]]:
    """Seconds of each layer's exchanges of rows, in a forward and in a backward: the busiest process's, one by one."""
    link = max(links, key=lambda link: link.seconds(1e6))
    measured = link.collectives.get(HALO)  # an exchange is a message sent and one received

    def exchanged(messages: Sequence[float]) -> float:
        if measured is None:
            return sum(map(link.seconds, messages))
        return measured.seconds(measured.processes, sum(messages) / 2, calls=len(messages) / 2)

    def slowest(processes: Sequence[Sequence[float]]) -> float:
        return max(map(exchanged, processes), default=0.0)

    cut = [halo_bytes(layer, space, examples) if side else NO_BYTES for layer, side in zip(layers, sides, strict=True)]
    return [slowest(each.forward) for each in cut], [slowest(each.backward) for each in cut]


def layer_parts(
    layers: Sequence[LayerCost],
    tensor: int,
    space: tuple[int, int],
    sides: Sequence[int],
    counted: Sequence[LayerCost] | None = None,
) -> list[LayerCost]:
    """The cost of one process's part of each layer; `counted` are the layers as `tensor` processes share them."""
    slabs = space[0] * space[1]
    by_weights, by_images = dividing(tensor, fixed=True), dividing(slabs, fixed=False)
    shared = [by_tensor(layer, tensor, by_weights) for layer in layers] if counted is None else counted
    return [by_space(layer, slabs, side, by_images) for layer, side in zip(shared, sides, strict=True)]


class Exchanged(NamedTuple):
    """Pixels of each message of one exchange: those that each process sends, and those that it receives."""

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[tuple[int, ...], ...]


NOTHING = Exchanged((), ())


class CutImage(NamedTuple):
    """The cut axes of an image window: its input's rows, what slides along them, and the parts."""

    sizes: tuple[int, ...]
    windows: tuple[Window, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(cls, window: ImageWindow, space: tuple[int, int]) -> "CutImage":
        """The axes of a window that `space` cuts."""
        axes = [axis for axis in (0, 1) if space[axis] > 1]
        return cls(
            tuple(window.sizes[axis] for axis in axes),
            tuple(window.windows[axis] for axis in axes),
            tuple(space[axis] for axis in axes),
        )

    @property
    def whole(self) -> bool:
        """Whether every process has the whole image by now: a single row is never cut, it comes from a global pool."""
        return 1 in self.sizes

    @property
    def outputs(self) -> tuple[int, ...]:
        """The rows of the output along each cut axis."""
        return tuple(window.outputs(size) for window, size in zip(self.windows, self.sizes, strict=True))


def too_few_rows(window: ImageWindow, space: tuple[int, int]) -> bool:
    """Whether some process would have no row of the input or the output, which training refuses."""
    cut = CutImage.of(window, space)
    if cut.whole:
        return False
    outputs = () if window.at_one_row != "refused" and set(cut.outputs) == {1} else cut.outputs
    return any(rows < count for sizes in (cut.sizes, outputs) for rows, count in zip(sizes, cut.parts, strict=False))


def exchanged(window: ImageWindow, space: tuple[int, int]) -> Exchanged:
    """The pixels that a window's forward sends, process by process; its backward sends as many the other way."""
    cut = CutImage.of(window, space)
    summed = window.at_one_row == "summed" and set(cut.outputs) == {1}
    if cut.whole or summed or not cut.parts:
        return NOTHING
    axes = zip(window.sizes, window.windows, space, strict=True)
    uncut = prod(uncut_rows(size, slid) for size, slid, count in axes if count == 1)
    return boxes_of(cut, uncut, gathers=gathers(window, space))


def uncut_rows(size: int, window: Window) -> int:
    """The rows that are sent of an axis that is not cut: a convolution with unequal padding pads it beforehand."""
    if isinstance(window, SlidingWindow) and window.before != window.after:
        return size + window.before + window.after
    return size


@lru_cache(maxsize=4096)
def boxes_of(cut: CutImage, uncut: int, *, gathers: bool) -> Exchanged:
    """The messages of an exchange; `uncut` is the number of pixels for each row of the cut axes."""
    rows = gathered_rows(cut) if gathers else axis_rows(cut.windows, cut.sizes, cut.parts)
    routes = [route(rows, place) for place in product(*map(range, cut.parts))]
    return Exchanged(
        tuple(tuple(uncut * pixels(box.source) for box in each.sends) for each in routes),
        tuple(tuple(uncut * pixels(box.target) for box in each.receives) for each in routes),
    )


def gathered_rows(cut: CutImage) -> tuple[AxisRows, ...]:
    """Along each cut axis, what processes have where all of them want the whole image."""
    return tuple(
        AxisRows(cuts(size, count), (want(RowRange(0, size), size),) * count)
        for size, count in zip(cut.sizes, cut.parts, strict=True)
    )


def pixels(block: Sequence[RowRange]) -> int:
    """The number of pixels in a block of the cut axes."""
    return prod(rows.size for rows in block)


class HaloBytes(NamedTuple):
    """Bytes of each message that each process sends in a layer's forward and in its backward."""

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]


NO_BYTES = HaloBytes((), ())


def halo_bytes(layer: LayerCost, space: tuple[int, int], examples: float) -> HaloBytes:
    """The messages of a layer's convolutions and pools, on the whole images of a micro-batch cut by `space`.

    Backward sends the gradients of received rows back; not of gathered images, of which each process has its slice.
    """
    processes = space[0] * space[1]
    forward: list[list[float]] = [[] for _ in range(processes)]
    backward: list[list[float]] = [[] for _ in range(processes)]
    for window in layer.image_windows:
        pixel, found = window.pixel.at(examples), exchanged(window, space)
        for place, (sends, receives) in enumerate(zip(*found, strict=True)):
            forward[place] += [pixel * number for number in sends]
            if window.differentiated and not gathers(window, space):
                backward[place] += [pixel * number for number in receives]
    return HaloBytes(*(tuple(map(tuple, sides)) for sides in (forward, backward)))


def gathers(window: ImageWindow, space: tuple[int, int]) -> bool:
    """Whether a pool gathers whole images, as its output has one row along each cut axis."""
    return window.at_one_row == "gathered" and set(CutImage.of(window, space).outputs) == {1}
