"""Measures which weights a stage's passes saw and how many bytes a stage held, while it trains.

An observer samples the forwards of a few minibatches and follows these to their backwards, and to the updates that
their predictions aimed at. It copies weights, so it observes a few minibatches only; it reads and never writes, so
training comes to the same numbers with it and without.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.linalg import vector_norm

from stretto.losses.minibatch_counts import Target
from stretto.nn.batch import call, with_names_of
from stretto.nn.seeding import PreservedGenerator
from stretto.schedule import Action
from stretto.schedule.delay import BACKWARD
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import ForwardState, Graph, Stage, begins_in_place, head_loss
from stretto.weights.saved_tensor_check import tensors_in

Values = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One figure a stage. Norms run over all trainable parameters of the stage's module (not of its head).

    mismatch: ||w_forward - w_backward|| / ||w||: the weights that a micro-batch's forward saw, those that its backward
    read, and those that stood when the backward ran. prediction_error: ||w_predicted - w_actual|| / ||w_actual||, for
    a prediction made after k updates to look h ahead, w_actual being the weights after k + round(h) updates;
    unpredicted_error: the same with the weights after k updates in place of the prediction. All three are means over
    the sampled micro-batches; None where there was nothing to measure.

    weight_bytes, activation_bytes: the most that the stage held while minibatches were sampled, in bytes. Weights are
    those of module and head, every other version that a forward, a backward or a rule for weights keeps or reads, each
    storage once; gradients and the optimizer's state are not among them, nor what an update needs for its own time.
    Activations are the inputs of each forward in flight and what autograd saves of it, without weights and targets.
    """

    mismatch: tuple[float | None, ...]
    prediction_error: tuple[float | None, ...]
    unpredicted_error: tuple[float | None, ...]
    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]


class Observer:
    """Observes an interpreter: samples the micro-batches that enter in turns `first` to `first + minibatches - 1`.

    It stops by itself once it is `done`; until then `figures` has what is known so far. Another observer of the same
    interpreter replaces it.
    """

    def __init__(self, interpreter: Interpreter, first: int, minibatches: int) -> None:
        pieces = interpreter.schedule.per_turn
        samples = range(first * pieces, (first + minibatches) * pieces)
        self._interpreter = interpreter
        self._stages = {index: StageObserver(stage, samples) for index, stage in interpreter.stages.items()}
        interpreter.watch = self._see

    @property
    def done(self) -> bool:
        """Whether all sampled micro-batches have had their backward, and all predictions have been measured."""
        return all(stage.done for stage in self._stages.values())

    @property
    def watching(self) -> bool:
        """Whether it still observes; a change of phase ends that, too."""
        return self._interpreter.watch == self._see

    def stop(self) -> None:
        """Stop observing."""
        if self.watching:
            self._interpreter.watch = None

    def figures(self) -> Observed:
        """What has been measured so far."""
        errors = [list(zip(*stage.errors, strict=True)) or [(), ()] for stage in self._stages.values()]
        return Observed(
            mismatch=tuple(mean(stage.mismatches) for stage in self._stages.values()),
            prediction_error=tuple(mean(predicted) for predicted, _ in errors),
            unpredicted_error=tuple(mean(unpredicted) for _, unpredicted in errors),
            weight_bytes=tuple(stage.weight_bytes for stage in self._stages.values()),
            activation_bytes=tuple(stage.activation_bytes for stage in self._stages.values()),
        )

    def _see(self, action: Action, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        used = operands.get("input") if action.kind == "C" else None  # part of the graph after a recompute
        values = [
            (edge.value, value)
            for edge, value in self._interpreter.values.items()
            if edge.stage == action.stage and value is not used
        ]
        in_flight = InFlight(
            *([value for name, value in values if name == kind] for kind in ("graph", "version", "input"))
        )
        with torch.no_grad():
            self._stages[action.stage].observe(action, operands, results, in_flight)
        if self.done:
            self.stop()


class InFlight(NamedTuple):
    """What a stage keeps of the forwards in flight: graphs, or, before a recompute, what they saw and their inputs."""

    graphs: Sequence[Graph]
    seen: Sequence[ForwardState]
    inputs: Sequence[tuple[Tensor, ...]]


class PendingPrediction(NamedTuple):
    """A prediction that waits for the update it aims at."""

    updates: int
    predicted: Values
    before: Values  # the weights at the time of the prediction


class StageObserver:
    """Measures one stage."""

    def __init__(self, stage: Stage, samples: range) -> None:
        self.mismatches: list[float] = []
        self.errors: list[tuple[float, float]] = []  # with and without prediction
        self.weight_bytes = 0
        self.activation_bytes = 0
        self._stage = stage
        parts = [part for part in (stage.module, stage.head) if part is not None]
        self._parameters: list[Tensor] = [parameter for part in parts for parameter in part.parameters()]
        self._weights: Values = {name: p for name, p in stage.module.named_parameters() if p.requires_grad}
        self._samples = samples
        self._backwards_left = len(samples)
        self._measuring = False  # from the first sampled forward to the first one after the samples
        self._kept_bytes = 0  # that one forward keeps for its backward
        self._forwards: dict[int, Values] = {}  # of the micro-batches in flight
        self._pending: list[PendingPrediction] = []
        self._latest: tuple[tuple[int, int], Values] | None = None  # copies, shared by forwards that saw the same

    @property
    def done(self) -> bool:
        return not self._backwards_left and not self._pending

    def observe(
        self, action: Action, operands: Mapping[str, Any], results: Mapping[str, Any], in_flight: InFlight
    ) -> None:
        """Measure an action of this stage that has just run; its operands are still part of `in_flight`."""
        kind, _, microbatch = action
        if kind == "F":
            self._measuring = microbatch in self._samples
            if self._measuring:
                self._forward(microbatch, results["graph" if "graph" in results else "version"].version)
        if self._measuring:
            if not self._kept_bytes and "graph" in results:
                self._kept_bytes = kept_by_forward(self._stage, results["graph"], operands.get("target"))
            self._measure_bytes(in_flight, operands.get("graph"))
        if kind in BACKWARD and microbatch in self._forwards:
            seen, read = self._forwards.pop(microbatch), self._stage.weights.backward_values(operands["graph"].version)
            self.mismatches.append(distance(seen, read, self._weights))
            self._backwards_left -= 1
        if kind == "U":
            self._compare()

    def _forward(self, microbatch: int, version: Any) -> None:
        self._forwards[microbatch] = predicted = self._copied(version)
        ahead = self._stage.weights.ahead()
        if ahead:
            before = copied(self._weights)
            self._pending.append(PendingPrediction(self._stage.updates + round(ahead), predicted, before))
            self._compare()

    def _copied(self, version: Any) -> Values:
        key = self._stage.updates, id(version)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, copied(self._stage.weights.forward_values(version))
        return self._latest[1]

    def _compare(self) -> None:
        actual = self._weights
        for prediction in self._pending:
            if prediction.updates == self._stage.updates:
                error = distance(prediction.predicted, actual, actual)
                self.errors.append((error, distance(prediction.before, actual, actual)))
        self._pending = [prediction for prediction in self._pending if prediction.updates > self._stage.updates]

    def _measure_bytes(self, in_flight: InFlight, consumed: Graph | None) -> None:
        tensors = [*self._parameters]
        versions = [graph.version for graph in in_flight.graphs] + [seen.version for seen in in_flight.seen]
        tensors += self._stage.weights.held(versions)
        if consumed is not None:
            tensors += self._stage.weights.backward_values(consumed.version).values()
        self.weight_bytes = max(self.weight_bytes, sum(storages(tensors).values()))
        inputs = sum(storages(tensors_in(list(in_flight.inputs))).values())
        self.activation_bytes = max(self.activation_bytes, len(in_flight.graphs) * self._kept_bytes + inputs)


@torch.enable_grad()
def kept_by_forward(stage: Stage, graph: Graph, target: Target | None) -> int:
    """Bytes that one forward keeps for its backward: its inputs and what autograd saves, each storage once.

    Weights and targets are left out: they exist anyway. Measured by running a copy of the stage once more on the inputs
    of `graph`.
    """
    module, head = copy.deepcopy((stage.module, stage.head))
    parts = [part for part in (module, head) if part is not None]
    excluded = storages(tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
    excluded |= storages(tensors_in([] if target is None else [target.value, *target.inputs]))
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in graph.inputs]
    kept = storages(inputs)

    def keep(tensor: Tensor) -> Tensor:
        kept.update(storages([tensor]))
        return tensor

    given = [tensor.clone() for tensor in inputs] if begins_in_place(module) else inputs
    alive: list[Any] = []  # a tensor that is freed may give its address to the next, which would not be counted
    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with PreservedGenerator(inputs[0].device), hooks, stage.context():
        alive.append(call(module, with_names_of(graph.inputs, given)))
        if target is not None:
            features = alive[0] if isinstance(alive[0], tuple) else (alive[0],)
            alive.append(head_loss(stage.loss, head, features, alive[0], target))
    return sum(size for address, size in kept.items() if address not in excluded)


def copied(values: Values) -> Values:
    return {name: value.detach().clone() for name, value in values.items()}


def distance(one: Values, other: Values, scale: Values) -> float:
    """||one - other|| / ||scale||; 0 for equal values, whatever the scale."""
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    if not differing:
        return 0.0
    return norm(one[name].to(wide(one[name])) - other[name] for name in differing) / norm(scale.values())


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype to subtract in: differences of half-precision weights are too small for their own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all entries together, in float64."""
    return float(torch.stack([vector_norm(tensor, dtype=torch.float64) for tensor in tensors]).norm())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
