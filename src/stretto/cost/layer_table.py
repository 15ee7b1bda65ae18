"""A table of what each layer of a model computes, sends and keeps, for predictions and plans. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import chain, pairwise
from typing import Any, Literal, TypeVar

from stretto.cost.collective import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from stretto.cost.records import TableReader
from stretto.errors import UsageError
from stretto.optimizers import NO_MATRICES, MatrixWork, Optimizer
from stretto.options.checks import sequence, whole
from stretto.parallel.space.geometry import Window

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Affine:
    """An amount that grows with the number b of examples in a micro-batch: `fixed + b each`."""

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> "Affine":
        """The line through two points (examples, amount)."""
        slope = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - few[0] * slope, slope)

    def at(self, examples: float) -> float:
        """The amount for a number of examples."""
        return self.fixed + examples * self.each

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed + other.fixed, self.each + other.each)

    def __sub__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed - other.fixed, self.each - other.each)


Amount = TypeVar("Amount", Affine, float)


@dataclass(frozen=True)
class ProductSizes:
    """The sizes of matrix products: how many there are, and the rows, columns and inner size of each."""

    number: Affine
    rows: Affine
    columns: Affine
    inner: Affine


@dataclass(frozen=True)
class Kernels:
    """`count` equal kernels of a GPU: FLOPs and bytes of each, and the random numbers that it draws.

    `product` has its sizes if it is a matrix product. On tensor cores a convolution of contiguous images has so many
    `transposes`, which read and write `transposed` bytes beside. `numbers` are those that it reads and writes one at a
    time, in so many `blocks` of threads, or that a pool compares (0 blocks). `plain` convolutions are products of
    contiguous images, for devices that take them so (`Attained.plain_products`). `kind` names those
    that move fewer bytes a second than a copy (`Attained.memory_of`).
    """

    count: float
    flops: Affine
    bytes: Affine
    product: ProductSizes | None = None
    random: Affine = Affine()
    transposed: Affine = Affine()
    transposes: int = 0
    numbers: Affine = Affine()
    blocks: int = 0
    plain: bool = False
    kind: str = ""


# Fields of `Kernels` that grow with examples, and those that do not.
KERNEL_AMOUNTS = ("flops", "bytes", "random", "transposed", "numbers")
KERNEL_FACTS = ("transposes", "blocks", "plain", "kind")


@dataclass(frozen=True)
class Work:
    """The operators of one sort in one pass: their number, their FLOPs, and the bytes that they read and write.

    `kernels` are what a GPU runs for them, one by one; empty where that is not known.
    """

    operator: str
    calls: float
    flops: Affine
    bytes: Affine
    kernels: tuple[Kernels, ...] = ()

    def __add__(self, other: "Work") -> "Work":
        assert self.operator == other.operator, "only work of the same sort of operator can be added"
        kernels = self.kernels + other.kernels if self.kernels and other.kernels else ()
        return Work(
            self.operator, self.calls + other.calls, self.flops + other.flops, self.bytes + other.bytes, kernels
        )


Works = tuple[Work, ...]  # one for each sort of operator, sorted by it
EXCHANGES = (TENSOR_SUM, TENSOR_GATHER, TENSOR_SCATTER)  # of processes that share a layer: bytes of the whole


def total_works(*passes: Works) -> Works:
    """The sum of several passes' works, by sort of operator."""
    totals: dict[str, Work] = {}
    for work in chain.from_iterable(passes):
        totals[work.operator] = totals[work.operator] + work if work.operator in totals else work
    return tuple(totals[operator] for operator in sorted(totals))


@dataclass(frozen=True)
class Measured:
    """Measured seconds, `t0 + b t1`: a forward, a backward, its halves I and W if they were measured, and an update.

    `accumulate` is the extra time of a backward that adds its gradients to another micro-batch's. `residual` is the
    largest relative error of these lines. While others compute all take `contention` times as long; None where that is
    not known.
    """

    forward: Affine
    backward: Affine
    input_gradient: Affine | None = None
    weight_gradient: Affine | None = None
    update: float | None = None
    accumulate: float | None = None
    residual: float = 0.0
    crowded: bool = False  # whether the machine's other workers computed at the same time
    contention: float | None = None


@dataclass(frozen=True)
class Peaks:
    """The peak bytes that one layer's passes allocate, above the bytes allocated when they begin.

    A forward's peak includes its output and the tensors that it keeps for the backward. A backward frees those as it
    goes and allocates gradients; its peak includes the gradient of its output. `again` is a backward that adds to
    existing gradients. Each peak is the largest of several lines, as larger batches peak at another operation.
    `largest` is the size of the largest trained parameter.
    """

    forward: tuple[Affine, ...]
    backward: tuple[Affine, ...]
    again: tuple[Affine, ...]
    largest: float

    def at(self, kind: str, examples: float) -> float:
        """The peak bytes of a pass: "forward", "backward" or "again"."""
        return max((line.at(examples) for line in getattr(self, kind)), default=0.0)


@dataclass(frozen=True)
class ImageWindow:
    """A convolution or pool of images, [N, C, H, W]: processes with slabs of them need rows of each other.

    `sizes` are the rows and columns of its input, `windows` what slides along each, `pixel` the bytes of one pixel of
    all examples. Backward sends gradients of those rows back if the input is `differentiated`. `at_one_row` says what
    becomes of an output with one row along each cut axis: whole images are gathered, or outputs summed.
    """

    sizes: tuple[int, int]
    windows: tuple[Window, Window]
    at_one_row: Literal["refused", "gathered", "summed"]
    differentiated: bool
    pixel: Affine


@dataclass(frozen=True)
class LayerCost:
    """A layer, or several consecutive ones as one.

    `backward` is B, `input_gradient` I and `weight_gradient` W, each run alone: I and W both go backward through the
    operators inside a layer. If the input needs no gradient, B is W. FLOPs are torch's: a multiplication and an
    addition are two, element-wise operations count 0.

    Bytes: `activation` is kept by autograd for the backward, without parameters, each storage once; `shared` is the
    part of it that earlier layers keep too. `input` and `output` are sent between stages; `loose_input` and
    `loose_output` are the parts of them that the layer itself does not keep. `recomputed` is what its backward makes
    again before it frees it, beside what is kept. Only single layers have `peaks`.
    `image_windows` are its convolutions and pools of images, in the order in which they run. `matrices` is what some
    optimizers keep and compute for its matrices, `matrix_shapes` are those of its trained parameters with two dims; a
    parameter that layers share counts there in the first of them alone.

    `forward_exchanges` and `backward_exchanges` are what processes that share the layer send each other, None where
    that has not been counted. `summed_once` are bytes of gradients that they sum once a step. `sent_gradients` are
    bytes of gradients of weights that another stage steps: each backward makes them anew, and they go there.
    """

    name: str
    type: str
    forward: Works
    backward: Works
    input_gradient: Works
    weight_gradient: Works
    differentiated: bool  # whether the input needs a gradient
    parameters: int  # how many numbers, frozen parameters included
    parameter_tensors: int  # how many trained parameters
    parameter_bytes: float
    gradient_bytes: float
    activation: Affine
    shared: Affine
    input: Affine
    output: Affine
    loose_input: Affine
    loose_output: Affine
    measured: Measured | None = None
    peaks: Peaks | None = None
    forward_exchanges: Works | None = None
    backward_exchanges: Works | None = None
    image_windows: tuple[ImageWindow, ...] = ()
    recomputed: Affine = Affine()
    summed_once: float = 0.0
    matrices: MatrixWork = NO_MATRICES
    matrix_shapes: tuple[tuple[int, int], ...] = ()
    sent_gradients: float = 0.0

    def state_bytes(self, optimizer: Optimizer) -> float:
        """Bytes of an optimizer's state, of the dtype of the parameters."""
        if not self.parameters:
            return 0.0
        return optimizer.state_numbers(self.trained, self.matrices) * self.parameter_bytes / self.parameters

    @property
    def trained(self) -> float:
        """How many numbers are trained."""
        return self.gradient_bytes * self.parameters / self.parameter_bytes if self.parameters else 0.0

    def works(self, kind: Kind) -> Works:
        """The work of an action of this kind."""
        return {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}[kind]

    def flops(self, kind: Kind = "F") -> Affine:
        """FLOPs of an action of this kind."""
        return reduce(Affine.__add__, (work.flops for work in self.works(kind)), Affine())

    @property
    def held(self) -> Affine:
        """Bytes that a stage of this layer alone keeps of a micro-batch from its forward to its backward."""
        return self.activation + self.loose_input + self.loose_output

    def then(self, after: "LayerCost") -> "LayerCost":
        """This layer and the next one as one layer.

        Its weight gradient is a whole backward of all layers above the lowest one with trained parameters.
        """
        trains = self.parameter_tensors > 0
        return LayerCost(
            name=f"{self.name.partition('..')[0]}..{after.name.rpartition('..')[2]}",
            type="stage",
            forward=total_works(self.forward, after.forward),
            backward=total_works(self.backward, after.backward),
            input_gradient=total_works(self.input_gradient, after.input_gradient) if self.differentiated else (),
            weight_gradient=total_works(self.weight_gradient, after.backward) if trains else after.weight_gradient,
            differentiated=self.differentiated,
            parameters=self.parameters + after.parameters,
            parameter_tensors=self.parameter_tensors + after.parameter_tensors,
            parameter_bytes=self.parameter_bytes + after.parameter_bytes,
            gradient_bytes=self.gradient_bytes + after.gradient_bytes,
            activation=self.activation + after.activation - after.shared,
            shared=self.shared,
            input=self.input,
            output=after.output,
            loose_input=self.loose_input,
            loose_output=after.loose_output,
            measured=measured_together(self, after),
            forward_exchanges=exchanges_together(self.forward_exchanges, after.forward_exchanges),
            backward_exchanges=exchanges_together(self.backward_exchanges, after.backward_exchanges),
            image_windows=self.image_windows + after.image_windows,
            matrix_shapes=self.matrix_shapes + after.matrix_shapes,
            recomputed=max(self.recomputed, after.recomputed, key=lambda bytes: (bytes.each, bytes.fixed)),
            summed_once=self.summed_once + after.summed_once,
            matrices=self.matrices + after.matrices,
            sent_gradients=self.sent_gradients + after.sent_gradients,
        )


def keeping_inputs(layer: LayerCost) -> LayerCost:
    """A layer that keeps its input alone, and runs its forward again in each of its backwards; a loss as it is."""
    if layer.type == "Loss":
        return layer
    kept, again, times = layer.input - layer.loose_input, layer.forward, layer.measured
    recomputed = layer.activation - kept

    def repeated(works: Works) -> Works:
        return total_works(works, again) if works else ()

    def longer(line: Affine | None) -> Affine | None:
        return None if line is None or times is None or line == Affine() else line + times.forward

    if times is not None:
        inputs, weights = longer(times.input_gradient), longer(times.weight_gradient)
        backward = longer(times.backward) or Affine()
        times = replace(times, backward=backward, input_gradient=inputs, weight_gradient=weights)
    return replace(
        layer,
        backward=repeated(layer.backward),
        input_gradient=repeated(layer.input_gradient),
        weight_gradient=repeated(layer.weight_gradient),
        activation=layer.input,
        shared=Affine(),
        loose_input=Affine(),
        loose_output=layer.output,
        recomputed=recomputed if layer.backward else Affine(),
        measured=times,
        peaks=None if layer.peaks is None else peaks_again(layer.peaks, layer.output, recomputed),
        backward_exchanges=exchanges_together(layer.backward_exchanges, layer.forward_exchanges),
    )


def peaks_again(peaks: Peaks, gradient: Affine, recomputed: Affine) -> Peaks:
    """The peaks of a layer whose backwards begin with a forward, beside the gradient of its output."""
    forward = [line + gradient for line in peaks.forward]
    backward, again = ([*forward, *(line + recomputed for line in lines)] for lines in (peaks.backward, peaks.again))
    return replace(peaks, backward=highest(backward), again=highest(again))


def with_recomputed(layer: LayerCost, whole: LayerCost) -> LayerCost:
    """A layer of which parts are recomputed, with the bytes that these are, by the same layer without; and its name."""
    return replace(layer, name=whole.name, recomputed=whole.activation - layer.activation)


def exchanges_together(below: Works | None, above: Works | None) -> Works | None:
    """The exchanges of two consecutive layers; None unless both were counted."""
    return None if below is None or above is None else total_works(below, above)


def measured_together(below: LayerCost, above: LayerCost) -> Measured | None:
    """The measured times of two consecutive layers together; None unless both were measured."""
    lower, upper = below.measured, above.measured
    if lower is None or upper is None:
        return None

    def added(one: Amount | None, other: Amount | None) -> Amount | None:
        return None if one is None or other is None else one + other

    return Measured(
        lower.forward + upper.forward,
        lower.backward + upper.backward,
        added(lower.input_gradient, upper.input_gradient) if below.differentiated else Affine(),
        added(lower.weight_gradient, upper.backward) if below.parameter_tensors else upper.weight_gradient,
        added(lower.update, upper.update),
        added(lower.accumulate, upper.accumulate),
        max(lower.residual, upper.residual),
        lower.crowded and upper.crowded,
        None if None in (lower.contention, upper.contention) else max(lower.contention or 1, upper.contention or 1),
    )


@dataclass(frozen=True)
class TiedLayers:
    """A parameter that several layers share, by their indices; the bytes are part of each of their rows.

    If it is `borrowed` of another stage, they have its weights alone, no gradients and no state.
    """

    layers: tuple[int, ...]
    bytes: float
    borrowed: bool = False


@dataclass(frozen=True)
class ModelCosts:
    """A row for each layer, in order; `dtype` is that of the parameters (float32, bfloat16).

    Every backward takes `start` seconds, and every step of the optimizer `step` seconds, beside the measured times of
    its layers. `ties` are the parameters that several layers share; `read_rows` has (l, the row of layer l if it reads
    these without training them), for layers that do not have them first, where that was counted.
    """

    layers: tuple[LayerCost, ...]
    dtype: str
    start: float = 0.0
    step: float = 0.0
    ties: tuple[TiedLayers, ...] = ()
    read_rows: tuple[tuple[int, LayerCost], ...] = ()

    def stages(self, bounds: Sequence[int]) -> tuple[LayerCost, ...]:
        """A row for each stage: stage s holds the layers from bounds[s] up to bounds[s + 1].

        Raises UsageError for bounds that leave layers out, or a stage without any.
        """
        sequence("bounds", bounds, "a list of whole numbers, where each stage begins, and the number of layers")
        for bound in bounds:
            whole("bounds", bound)
        num_layers = len(self.layers)
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_layers or any(b <= a for a, b in pairwise(bounds)):
            raise UsageError(
                f"bounds={list(bounds)} for {num_layers} layers: write 0, where each further stage begins, and "
                f"{num_layers}, each larger than the one before"
            )
        rows = [reduce(LayerCost.then, self.layers[start:stop]) for start, stop in pairwise(bounds)]
        repeats = [self.repeated(start, stop) for start, stop in pairwise(bounds)]
        gradients = [self.repeated(start, stop, gradients=True) for start, stop in pairwise(bounds)]
        return tuple(
            replace(
                row,
                parameters=row.parameters - round(more * row.parameters / row.parameter_bytes),
                parameter_bytes=row.parameter_bytes - more,
                gradient_bytes=row.gradient_bytes - more_gradients,
            )
            if more
            else row
            for row, more, more_gradients in zip(rows, repeats, gradients, strict=True)
        )

    def repeated(self, start: int, stop: int, *, gradients: bool = False) -> float:
        """Bytes of shared weights, or of their `gradients`, that rows from `start` up to `stop` count more than once.

        Borrowed weights have no gradients there.
        """
        uses = (
            (sum(start <= layer < stop for layer in tie.layers), tie.bytes)
            for tie in self.ties
            if not (gradients and tie.borrowed)
        )
        return sum((count - 1) * num_bytes for count, num_bytes in uses if count)

    def spread(self, places: Sequence[int]) -> "ModelCosts":
        """The table of a model whose layer i is like layer places[i] of this one, named by its number; a loss behind.

        Layers that share a parameter are those that stand for themselves alone.
        """
        rows = [replace(self.layers[place], name=str(index)) for index, place in enumerate(places)]
        rest = self.layers[max(places) + 1 :]
        ties = tuple(replace(tie, layers=tuple(map(places.index, tie.layers))) for tie in self.ties)
        reading = tuple(
            (index, replace(row, name=str(index))) for place, row in self.read_rows for index in [places.index(place)]
        )
        return replace(self, layers=(*rows, *rest), ties=ties, read_rows=reading)

    @property
    def parameters(self) -> int:
        """How many numbers the model has, those that several layers share once."""
        each = max((row.parameter_bytes / row.parameters for row in self.layers if row.parameters), default=1.0)
        shared = sum((len(tie.layers) - 1) * tie.bytes / each for tie in self.ties)
        return sum(row.parameters for row in self.layers) - round(shared)

    @property
    def whole(self) -> LayerCost:
        """The whole model as one layer."""
        return reduce(LayerCost.then, self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The table as nested dicts and lists, for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "ModelCosts":
        """The table that `to_dict` turned into `content`, also after a trip through JSON."""
        return TableReader("table of layers").record(cls, "", content)


def measured_of(content: Mapping[str, Any]) -> Measured:
    """Measured times from nested dicts."""
    return TableReader("layer").record(Measured, "", content)


def highest(lines: Sequence[Affine]) -> tuple[Affine, ...]:
    """The lines that are the highest for some number of examples; powers of 2 are tried."""
    return tuple(dict.fromkeys(max(lines, key=lambda line: line.at(1 << power)) for power in range(24)))
