"""What every layer of a model computes, moves and keeps: a table that predictions and plans read. No torch here."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from itertools import pairwise
from typing import Any, Literal, TypeVar

from stretto.errors import UsageError
from stretto.options.checks import sequence, whole

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class Affine:
    """An amount that grows with the examples of a micro-batch: `fixed + b each`."""

    fixed: float = 0.0
    each: float = 0.0

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> "Affine":
        """The line through two points (examples, amount)."""
        each = (many[1] - few[1]) / (many[0] - few[0])
        return cls(few[1] - few[0] * each, each)

    def at(self, examples: float) -> float:
        """The amount for so many examples."""
        return self.fixed + examples * self.each

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed + other.fixed, self.each + other.each)

    def __sub__(self, other: "Affine") -> "Affine":
        return Affine(self.fixed - other.fixed, self.each - other.each)


Amount = TypeVar("Amount", Affine, float)


@dataclass(frozen=True)
class Work:
    """What the operators of one sort do in one pass: how many there are, their FLOPs, the bytes they read and write."""

    operator: str
    calls: float
    flops: Affine
    bytes: Affine

    def __add__(self, other: "Work") -> "Work":
        assert self.operator == other.operator, "only work of one sort adds up"
        return Work(self.operator, self.calls + other.calls, self.flops + other.flops, self.bytes + other.bytes)


Works = tuple[Work, ...]  # one for each sort of operator, sorted


def together(*passes: Works) -> Works:
    """The work of several passes."""
    found: dict[str, Work] = {}
    for work in (each for works in passes for each in works):
        found[work.operator] = found[work.operator] + work if work.operator in found else work
    return tuple(found[operator] for operator in sorted(found))


@dataclass(frozen=True)
class Measured:
    """Measured seconds, `t0 + b t1`: forward, whole backward, its halves where they were measured; a step's update.

    `accumulate` is what a backward takes longer that finds another micro-batch's gradients to add its own to.
    `residual` is the largest relative error of these lines.
    """

    forward: Affine
    backward: Affine
    input_gradient: Affine | None = None
    weight_gradient: Affine | None = None
    update: float | None = None
    accumulate: float | None = None
    residual: float = 0.0
    crowded: bool = False  # whether the machine's other workers computed meanwhile


@dataclass(frozen=True)
class Peaks:
    """The most bytes that one layer's passes take beside what is there when they begin.

    A forward's output and what it keeps are part of it. A backward begins with what the graph keeps, frees it on its
    way, and makes its gradients; that of its output is part of it. `again` is one that adds to gradients that are
    there. Each is the most of several lines: with larger batches another moment is the worst. `largest` is the largest
    parameter that is trained.
    """

    forward: tuple[Affine, ...]
    backward: tuple[Affine, ...]
    again: tuple[Affine, ...]
    largest: float

    def at(self, kind: str, examples: float) -> float:
        """The most bytes of a pass: "forward", "backward" or "again"."""
        return max((line.at(examples) for line in getattr(self, kind)), default=0.0)


@dataclass(frozen=True)
class LayerCost:
    """A layer, or several that follow one another.

    `backward` is B, `input_gradient` I and `weight_gradient` W, each as it runs alone: a layer of several operators
    goes down its inside twice if I and W do. Where the input needs no gradient, B is W. FLOPs are torch's
    (a multiplication and an addition are two; element-wise work counts nothing).

    Bytes: `activation` is what autograd keeps for the backward, parameters excluded, each storage once; `shared` is
    the part of it that earlier layers keep too, `input` and `output` travel between stages, and `loose_input`,
    `loose_output` are the parts of them that the layer itself does not keep. Only single layers have `peaks`.
    """

    name: str
    type: str
    forward: Works
    backward: Works
    input_gradient: Works
    weight_gradient: Works
    differentiated: bool  # whether the input needs a gradient
    parameters: int  # numbers, those that are not trained too
    parameter_tensors: int  # those that are trained
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

    def works(self, kind: Kind) -> Works:
        """What an action of a kind does."""
        return {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}[kind]

    def flops(self, kind: Kind = "F") -> Affine:
        """FLOPs of an action of a kind."""
        return reduce(Affine.__add__, (work.flops for work in self.works(kind)), Affine())

    @property
    def held(self) -> Affine:
        """Bytes that a stage of this layer alone keeps of a micro-batch from its forward to its backward."""
        return self.activation + self.loose_input + self.loose_output

    def then(self, after: "LayerCost") -> "LayerCost":
        """This layer and the one behind it as one.

        A weight gradient is a whole backward of all layers above the lowest one that has something to train.
        """
        trains = self.parameter_tensors > 0
        return LayerCost(
            name=f"{self.name.partition('..')[0]}..{after.name.rpartition('..')[2]}",
            type="stage",
            forward=together(self.forward, after.forward),
            backward=together(self.backward, after.backward),
            input_gradient=together(self.input_gradient, after.input_gradient) if self.differentiated else (),
            weight_gradient=together(self.weight_gradient, after.backward) if trains else after.weight_gradient,
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
        )


def measured_together(below: LayerCost, above: LayerCost) -> Measured | None:
    """Measured times of two layers in a row; None unless both have them."""
    first, after = below.measured, above.measured
    if first is None or after is None:
        return None

    def both(one: Amount | None, other: Amount | None) -> Amount | None:
        return None if one is None or other is None else one + other

    return Measured(
        first.forward + after.forward,
        first.backward + after.backward,
        both(first.input_gradient, after.input_gradient) if below.differentiated else Affine(),
        both(first.weight_gradient, after.backward) if below.parameter_tensors else after.weight_gradient,
        both(first.update, after.update),
        both(first.accumulate, after.accumulate),
        max(first.residual, after.residual),
        first.crowded and after.crowded,
    )


@dataclass(frozen=True)
class TiedLayers:
    """A parameter that several layers train, by their places; each of their rows has it."""

    layers: tuple[int, ...]
    bytes: float


@dataclass(frozen=True)
class ModelCosts:
    """A row for each layer, in order; `dtype` is that of the parameters (float32, bfloat16).

    `start` seconds are what any backward takes beside its layers, `step` seconds what any step of the optimizer does:
    measured times of layers are without them. `ties` are the parameters that several layers train.
    """

    layers: tuple[LayerCost, ...]
    dtype: str
    start: float = 0.0
    step: float = 0.0
    ties: tuple[TiedLayers, ...] = ()

    def stages(self, bounds: Sequence[int]) -> tuple[LayerCost, ...]:
        """A row for each stage: stage s holds the layers from bounds[s] up to bounds[s + 1].

        Raises UsageError for bounds that leave layers out, or a stage without any.
        """
        sequence("bounds", bounds, "a list of whole numbers, where each stage begins, and the number of layers")
        for bound in bounds:
            whole("bounds", bound)
        number = len(self.layers)
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != number or any(b <= a for a, b in pairwise(bounds)):
            raise UsageError(
                f"bounds={list(bounds)} for {number} layers: write 0, where each further stage begins, and {number}, "
                "each larger than the one before"
            )
        return tuple(reduce(LayerCost.then, self.layers[start:stop]) for start, stop in pairwise(bounds))

    def tied(self, bounds: Sequence[int]) -> dict[tuple[int, int], float]:
        """Bytes of the weights that a stage (second) borrows of the first one that has them, which owns them."""
        found: dict[tuple[int, int], float] = {}
        for tie in self.ties:
            owner, *users = dict.fromkeys(bisect_right(bounds, layer) - 1 for layer in sorted(tie.layers))
            for user in users:
                found[owner, user] = found.get((owner, user), 0.0) + tie.bytes
        return dict(sorted(found.items()))

    @property
    def whole(self) -> LayerCost:
        """All layers as one."""
        return reduce(LayerCost.then, self.layers)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "ModelCosts":
        """From what `to_dict` gave, also through JSON."""
        rows = tuple(layer_of(layer) for layer in content["layers"])
        ties = tuple(TiedLayers(tuple(tie["layers"]), tie["bytes"]) for tie in content["ties"])
        return cls(rows, content["dtype"], content["start"], content["step"], ties)


def layer_of(content: Mapping[str, Any]) -> LayerCost:
    """A row from plain data."""
    works = {"forward", "backward", "input_gradient", "weight_gradient"}
    read: dict[str, Any] = {}
    for key in (each.name for each in fields(LayerCost)):
        value = content[key]
        if key in works:
            read[key] = tuple(
                Work(w["operator"], w["calls"], Affine(**w["flops"]), Affine(**w["bytes"])) for w in value
            )
        elif key == "measured":
            read[key] = None if value is None else measured_of(value)
        elif key == "peaks":
            read[key] = None if value is None else peaks_of(value)
        else:
            read[key] = Affine(**value) if isinstance(value, Mapping) else value
    return LayerCost(**read)


def highest(lines: Sequence[Affine]) -> tuple[Affine, ...]:
    """Those of some lines that are above all others for some number of examples (powers of two are tried)."""
    return tuple(dict.fromkeys(max(lines, key=lambda line: line.at(1 << power)) for power in range(24)))


def measured_of(content: Mapping[str, Any]) -> Measured:
    """Measured times from plain data."""
    read: dict[str, Any] = {key: Affine(**v) if isinstance(v, Mapping) else v for key, v in content.items()}
    return Measured(**read)


def peaks_of(content: Mapping[str, Any]) -> Peaks:
    """Peaks from plain data."""
    forward, backward, again = (tuple(Affine(**x) for x in content[key]) for key in ("forward", "backward", "again"))
    return Peaks(forward, backward, again, content["largest"])
