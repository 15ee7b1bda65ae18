"""What the passes of a stage really saw and what a stage really held, measured while it trains.

An observer samples the forwards of a few minibatches and follows these to their backwards, and to the updates that
their predictions aimed at. It copies weights, so it watches for a while only; it reads and never writes, so training
comes to the same numbers with it and without.
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

from stretto.nn.batch import call, like
from stretto.nn.seeding import PreservedGenerator
from stretto.schedule import Action
from stretto.schedule.delay import BACKWARD
from stretto.stage.interpreter import Interpreter
from stretto.stage.stage import ForwardState, Graph, Stage, Target, begins_in_place, head_loss
from stretto.weights.origins import tensors_in

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
    """Watches an interpreter from now on: samples what enters in turns `first` to `first + minibatches - 1`.

    It stops by itself once it is `done`; until then `figures` tells what is known so far. Another observer of the same
    interpreter takes its place.
    """

    def __init__(self, interpreter: Interpreter, first: int, minibatches: int) -> None:
        pieces = interpreter.schedule.per_turn
        samples = range(first * pieces, (first + minibatches) * pieces)
        self._interpreter = interpreter
        self._sights = {index: Sight(stage, samples) for index, stage in interpreter.stages.items()}
        interpreter.watch = self._see

    @property
    def done(self) -> bool:
        """Whether every sampled micro-batch has been through, and every prediction has met what it predicted."""
        return all(sight.done for sight in self._sights.values())

    @property
    def watching(self) -> bool:
        """Whether there is more to see; a phase of training with another schedule also ends it."""
        return self._interpreter.watch == self._see

    def stop(self) -> None:
        """Watch no longer."""
        if self.watching:
            self._interpreter.watch = None

    def figures(self) -> Observed:
        """What has been measured so far."""
        errors = [list(zip(*sight.errors, strict=True)) or [(), ()] for sight in self._sights.values()]
        return Observed(
            mismatch=tuple(mean(sight.mismatches) for sight in self._sights.values()),
            prediction_error=tuple(mean(predicted) for predicted, _ in errors),
            unpredicted_error=tuple(mean(unpredicted) for _, unpredicted in errors),
            weight_bytes=tuple(sight.weight_bytes for sight in self._sights.values()),
            activation_bytes=tuple(sight.activation_bytes for sight in self._sights.values()),
        )

    def _see(self, action: Action, operands: Mapping[str, Any], made: Mapping[str, Any]) -> None:
        used = operands.get("input") if action.kind == "C" else None  # it is part of the graph now
        own = [
            (edge.value, value)
            for edge, value in self._interpreter.values.items()
            if edge.stage == action.stage and value is not used
        ]
        flight = Flight(*([value for name, value in own if name == kind] for kind in ("graph", "version", "input")))
        with torch.no_grad():
            self._sights[action.stage].see(action, operands, made, flight)
        if self.done:
            self.stop()


class Flight(NamedTuple):
    """What a stage keeps of the forwards in flight: graphs; of those to be run again what they saw, their inputs."""

    graphs: Sequence[Graph]
    seen: Sequence[ForwardState]
    inputs: Sequence[tuple[Tensor, ...]]


class PendingPrediction(NamedTuple):
    """A prediction that waits for the update it aims at."""

    updates: int
    predicted: Values
    then: Values  # the weights it was made from


class Sight:
    """What is seen of one stage."""

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
        self._left = len(samples)
        self._weighing = False  # from the first sampled forward to the first one after
        self._saved = 0  # bytes that a forward keeps
        self._forwards: dict[int, Values] = {}  # of the micro-batches in flight
        self._forecasts: list[PendingPrediction] = []
        self._latest: tuple[tuple[int, int], Values] | None = None  # copies, shared by forwards that saw the same

    @property
    def done(self) -> bool:
        """Whether nothing is expected any more."""
        return not self._left and not self._forecasts

    def see(self, action: Action, operands: Mapping[str, Any], made: Mapping[str, Any], flight: Flight) -> None:
        """An action of this stage has just run; what it consumed is still part of `flight`."""
        kind, _, microbatch = action
        if kind == "F":
            self._weighing = microbatch in self._samples
            if self._weighing:
                self._forward(microbatch, made["graph" if "graph" in made else "version"].version)
        if self._weighing:
            if not self._saved and "graph" in made:
                self._saved = kept_by_forward(self._stage, made["graph"], operands.get("target"))
            self._weigh(flight, operands.get("graph"))
        if kind in BACKWARD and microbatch in self._forwards:
            seen, read = self._forwards.pop(microbatch), self._stage.weights.backward_values(operands["graph"].version)
            self.mismatches.append(distance(seen, read, self._weights))
            self._left -= 1
        if kind == "U":
            self._meet()

    def _forward(self, microbatch: int, version: Any) -> None:
        self._forwards[microbatch] = predicted = self._copied(version)
        ahead = self._stage.weights.ahead()
        if ahead:
            then = copied(self._weights)
            self._forecasts.append(PendingPrediction(self._stage.updates + round(ahead), predicted, then))
            self._meet()

    def _copied(self, version: Any) -> Values:
        key = self._stage.updates, id(version)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, copied(self._stage.weights.forward_values(version))
        return self._latest[1]

    def _meet(self) -> None:
        """Compare the predictions that aimed at the weights of now."""
        actual = self._weights
        for forecast in self._forecasts:
            if forecast.updates == self._stage.updates:
                errors = (distance(each, actual, actual) for each in (forecast.predicted, forecast.then))
                self.errors.append((next(errors), next(errors)))
        self._forecasts = [each for each in self._forecasts if each.updates > self._stage.updates]

    def _weigh(self, flight: Flight, consumed: Graph | None) -> None:
        tensors = [*self._parameters]
        versions = [graph.version for graph in flight.graphs] + [seen.version for seen in flight.seen]
        tensors += self._stage.weights.held(versions)
        if consumed is not None:
            tensors += self._stage.weights.backward_values(consumed.version).values()
        self.weight_bytes = max(self.weight_bytes, sum(storages(tensors).values()))
        inputs = sum(storages(tensors_in(list(flight.inputs))).values())
        self.activation_bytes = max(self.activation_bytes, len(flight.graphs) * self._saved + inputs)


@torch.enable_grad()
def kept_by_forward(stage: Stage, graph: Graph, target: Target | None) -> int:
    """Bytes that one forward keeps for its backward: its inputs and what autograd saves, each storage once.

    Weights and targets are not among them: they are there anyway. Found by running a copy of the stage once more on
    what `graph` was computed from.
    """
    module, head = copy.deepcopy((stage.module, stage.head))
    parts = [part for part in (module, head) if part is not None]
    own = storages(tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
    own |= storages(tensors_in([] if target is None else [target.value, *target.inputs]))
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in graph.inputs]
    kept = storages(inputs)

    def keep(tensor: Tensor) -> Tensor:
        kept.update(storages([tensor]))
        return tensor

    given = [tensor.clone() for tensor in inputs] if begins_in_place(module) else inputs
    alive: list[Any] = []  # whatever is freed gives its place to the next, which would then not be counted
    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with PreservedGenerator(inputs[0].device), hooks, stage.context():
        alive.append(call(module, like(graph.inputs, given)))
        if target is not None:
            features = alive[0] if isinstance(alive[0], tuple) else (alive[0],)
            alive.append(head_loss(stage.loss, head, features, alive[0], target))
    return sum(size for where, size in kept.items() if where not in own)


def copied(values: Values) -> Values:
    """The values as they are now."""
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
    """The storages of tensors by their address, and their sizes in bytes."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return fmean(values) if values else None
