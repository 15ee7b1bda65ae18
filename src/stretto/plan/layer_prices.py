"""The costs of layers as one stage, whatever the method: a table has at [i, j] the value of the layers [i, j).

What steps of the optimizer take beside their passes, for every way to cut layers: cures, products of matrices.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.cost.attained import AUTOCAST, BYTES
from stretto.cost.cluster import Cluster, Link
from stretto.cost.communication import all_reduce, exchange_seconds, gathering, gradient_sum, scattering
from stretto.cost.cure_costs import matrix_bytes
from stretto.cost.layer_sums import (
    HostLags,
    LayerTimes,
    Numbers,
    Table,
    Times,
    host_lags,
    range_max,
    range_sums,
    stage_sums,
    with_starts,
)
from stretto.cost.layer_table import LayerCost, ModelCosts, keeping_inputs
from stretto.cost.mixed_precision import step_factor, sum_seconds
from stretto.cost.stage_prediction import Machine, cure_seconds, matrix_seconds, times_by_part
from stretto.mesh import Mesh
from stretto.methods.cure import StepCure
from stretto.optimizers import Stepping, optimizer_of
from stretto.plan.places import DeviceKind, Places
from stretto.plan.problem import LayerForm, Problem, merged
from stretto.plan.programs import hidden_exchanges, share_kept_busy
from stretto.plan.split_layer_costs import halo_seconds, layer_parts, num_all_reduces_of

AMOUNTS = (
    "activation",
    "shared",
    "input",
    "output",
    "loose_input",
    "loose_output",
    "recomputed",
)  # of a layer, in bytes
UPDATE, ACCUMULATE = 4, 5  # columns of `LayerTimes`


class Sizes(NamedTuple):
    """Bytes of the layers [i, j) at [i, j]; `input` at i, `output` at j. `held` is kept of a micro-batch."""

    parameters: Table
    gradients: Table
    state: Table
    tensors: Table  # how many trained parameters
    held: Table
    recomputed: Table  # by the backward of the layer that recomputes most
    summed_once: Table  # gradients that processes which share weights sum once a turn
    largest: Table  # the weights of the largest layer
    sent: Table  # gradients of borrowed weights, of one micro-batch
    borrowed: Table  # weights of another stage
    input: Numbers
    output: Numbers


class Replicas(NamedTuple):
    """Links among replicas and their number; two are equal if their links are the same objects."""

    links: tuple[Link, ...]
    data: int
    gamma: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Replicas) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> Hashable:
        """Equal for the same links; comparing their figures takes longer."""
        return (*map(id, self.links), self.data, self.gamma)


class WeightMessages(NamedTuple):
    """Seconds in which replicas sum the gradients of the layers [i, j), gather their weights and scatter gradients."""

    gradient_sum: Table
    gather: Table
    scatter: Table


class LayerPrices:
    """The costs of layers as one stage, whatever the method: tables that several candidates share are computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = problem.dtype or problem.costs.dtype
        self.sides = problem.sides or (0,) * len(problem.layers)
        self.places = lru_cache(maxsize=None)(self._places)
        self.layers = lru_cache(maxsize=None)(self._layers)
        self.distinct = lru_cache(maxsize=None)(self._distinct)
        self.layer_parts = lru_cache(maxsize=None)(self._layer_parts)
        self.host_lags = lru_cache(maxsize=256)(self._host_lags)
        self.least_rows = lru_cache(maxsize=None)(self._least_rows)
        self.intra_stage = lru_cache(maxsize=1024)(self._intra_stage)
        self.exchanges: dict[Hashable, tuple[Numbers, Numbers]] = {}
        self.weight_messages = lru_cache(maxsize=256)(self._weight_messages)
        self.times = lru_cache(maxsize=256)(self._times)
        self.lines = lru_cache(maxsize=None)(self._lines)
        self.weights = lru_cache(maxsize=None)(self._weights)
        self.sizes = lru_cache(maxsize=256)(self._sizes)
        self.hides_exchanges = not problem.trained and problem.program.hides_exchanges  # of a tensor axis
        self.steps = StepTables(problem, self.dtype, self.distinct)

    def _places(self, mesh: Mesh, pipeline: int, placement: tuple[int, ...] = ()) -> Places:
        return Places.of(self.problem.cluster, mesh, pipeline, placement)

    def _layers(self, form: LayerForm) -> list[LayerCost]:
        if form.recompute == "full":
            return list(merged(self.rows(form)))
        whole, counted = self.problem.whole_costs(form), self.problem.counted_costs(form)
        shared = None if counted is None else merged(counted.layers)
        return layer_parts(merged(whole.layers), form.tensor, form.space, self.sides, shared)

    def rows(self, form: LayerForm) -> tuple[LayerCost, ...]:
        """The cost of one process's part of each layer, the loss apart."""
        whole, counted = self.problem.whole_costs(form), self.problem.counted_costs(form)
        sides = (*self.sides, *[0] * (len(whole.layers) - len(self.sides)))
        shared = None if counted is None else counted.layers
        parts = layer_parts(whole.layers, form.tensor, form.space, sides, shared)
        return tuple(all_keeping_inputs(parts) if form.recompute == "full" else parts)

    def seconds(
        self, layers: Sequence[LayerCost], kinds: Sequence[DeviceKind], examples: float, *, on_chip: bool = False
    ) -> Table:
        """Seconds of layers on the slowest of several kinds of devices, and of their hosts.

        [2, layers, 6]: device and host, columns as in `LayerTimes`.
        """
        costs = ModelCosts(tuple(layers), self.dtype)
        machines = [
            Machine(device.on_chip if on_chip else device, self.dtype, kind.crowded)
            for kind in kinds
            for device in [self.cluster.devices_by_kind[kind.worker]]
        ]
        rows: Table = np.maximum.reduce(
            [
                np.array([kind.slowest, 1.0])[:, None, None] * self.seconds_on(layers, costs, machine, examples)
                for kind, machine in zip(kinds, machines, strict=True)
            ]
        )
        return rows

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster, its devices as the program's kernels find them."""
        cluster = self.problem.cluster
        if not self.as_large_models:
            return cluster
        devices = {
            name: device
            if device.attained is None
            else replace(device, attained=self.problem.program.attains(device.attained))
            for name, device in cluster.devices.items()
        }
        return replace(cluster, devices=devices)

    def seconds_on(self, layers: Sequence[LayerCost], costs: ModelCosts, machine: Machine, examples: float) -> Table:
        """Seconds of layers on one machine, as `seconds`."""
        parts = times_by_part(costs, machine, examples, optimizer=self.steps.stepping)
        rows: Table = np.array(parts).transpose(1, 0, 2)
        if self.sums_as_large_models:
            fused = self.problem.program.fused_accumulation
            rows[0, :, ACCUMULATE] = [sum_seconds(layer, machine, examples, in_products=fused) for layer in layers]
        return rows

    @cached_property
    def sums_as_large_models(self) -> bool:
        """Whether gradients are added to earlier ones as systems for large models do."""
        attained = [device.attained for device in self.problem.cluster.devices.values()]
        return self.as_large_models and None not in attained and not self.dtype.endswith(AUTOCAST)

    @property
    def as_large_models(self) -> bool:
        """Whether the network is priced as systems for large models run it: if it is only planned."""
        return self.problem.weight_products

    def _distinct(self, form: LayerForm) -> tuple[list[LayerCost], NDArray[np.intp]]:
        # The layers that differ in more than their names, and for each layer which of them it is.
        layers, places = self.layers(form), dict[Hashable, int]()
        indices = [places.setdefault(unnamed(layer), len(places)) for layer in layers]
        firsts = [indices.index(place) for place in range(len(places))]
        return [replace(layers[first], name="") for first in firsts], np.array(indices)

    def _layer_parts(self, kind: DeviceKind, form: LayerForm, examples: float) -> Table:
        if kind.slowest != 1:
            return np.array([kind.slowest, 1.0])[:, None, None] * self.layer_parts(kind.on_average, form, examples)
        layers, indices = self.distinct(form)
        parts: Table = self.seconds(layers, [kind], examples)[:, indices]
        return parts

    def layer_rows(self, kind: DeviceKind, form: LayerForm, examples: float) -> Table:
        """Seconds of each layer on a kind of device: [layers, 6], columns as in `LayerTimes`."""
        rows: Table = self.layer_parts(kind, form, examples)[0]
        return rows

    def _host_lags(self, kind: DeviceKind, form: LayerForm, examples: float) -> HostLags | None:
        device, host = self.layer_parts(kind, form, examples)
        return host_lags(LayerTimes(*device.T), LayerTimes(*host.T))

    def _least_rows(self, kind: DeviceKind, form: LayerForm, examples: float) -> Table:
        if not self.stays_on_chip(kind):
            return self.layer_rows(kind, form, examples)
        rows: Table = self.seconds(self.layers(form), [kind], examples, on_chip=True)[0]
        return rows

    def stays_on_chip(self, kind: DeviceKind) -> bool:
        """Whether a kind of device has a memory on its chip."""
        return self.problem.cluster.devices_by_kind[kind.worker].on_chip_memory is not None

    def _times(self, kind: DeviceKind, form: LayerForm, examples: float) -> Times:
        if kind.slowest != 1:
            return Times(*(kind.slowest * table for table in self.times(kind.on_average, form, examples)))
        device = self.problem.cluster.devices_by_kind[kind.worker]
        times = self.times_of(self.layer_rows(kind, form, examples), device.speed)
        if device.on_chip_memory is None:
            return times
        sizes = self.sizes(form, examples)
        fits = sizes.parameters + sizes.held <= device.on_chip_memory
        on_chip = self.times_of(self.least_rows(kind, form, examples), device.speed)
        return Times(*(np.where(fits, near, far) for near, far in zip(on_chip, times, strict=True)))

    def times_of(self, rows: Table, speed: float) -> Times:
        """The times of the layers [i, j) as one stage, from those of single layers."""
        costs = self.problem.costs
        return with_starts(stage_sums(LayerTimes(*rows.T)), costs.start / speed, costs.step / speed)

    def _lines(self, form: LayerForm) -> dict[str, tuple[Numbers, Numbers]]:
        # The fixed bytes of each layer, and those for each example, by name.
        layers, indices = self.distinct(form)
        lines = {key: [getattr(layer, key) for layer in layers] for key in AMOUNTS}
        return {
            key: (np.array([line.fixed for line in each])[indices], np.array([line.each for line in each])[indices])
            for key, each in lines.items()
        }

    def amount(self, form: LayerForm, key: str, examples: float) -> Numbers:
        """An amount of bytes of each layer, by its name in `LayerCost`."""
        fixed, each = self.lines(form)[key]
        return fixed + examples * each

    def _weights(self, form: LayerForm) -> tuple[Table, ...]:
        # What of the sizes does not depend on examples.
        (layers, indices), state_of = self.distinct(form), self.problem.state
        amounts = [
            (x.parameter_bytes, x.gradient_bytes, state_of(x), x.parameter_tensors, x.summed_once, x.sent_gradients)
            for x in layers
        ]
        weights, gradients, state, tensors, once, sent = np.array(amounts, dtype=float)[indices].T
        more, more_gradients, more_tensors, borrowed = self.repeats(form)
        more_of_all = more, more_gradients, self.problem.state_of_repeated * more_gradients, more_tensors
        tables = zip((weights, gradients, state, tensors), more_of_all, strict=True)
        sums = (range_sums(values) - twice for values, twice in tables)
        return *sums, range_sums(once), range_max(weights), range_sums(sent), borrowed

    def repeats(self, form: LayerForm) -> tuple[Table, Table, Table, Table]:
        """What the rows of the layers [i, j) count more than once: bytes of shared weights, bytes of their gradients,
        and how many of these there are; and the bytes of those that they borrow.
        """
        counted, layers = self.problem.counted_costs(form), len(self.problem.layers)
        costs, parts = (self.problem.whole_costs(form), form.tensor) if counted is None else (counted, 1)
        num_bytes, gradients, tensors, borrowed = (np.zeros((layers + 1,) * 2) for _ in range(4))
        for tie in costs.ties:
            uses = range_sums(np.isin(np.arange(layers), tie.layers).astype(float))
            more = np.maximum(0.0, uses - 1)
            num_bytes = num_bytes + more * tie.bytes / parts
            if tie.borrowed:
                borrowed = borrowed + np.minimum(1.0, uses) * tie.bytes / parts
            else:
                gradients, tensors = gradients + more * tie.bytes / parts, tensors + more
        return num_bytes, gradients, tensors, borrowed

    def _sizes(self, form: LayerForm, examples: float) -> Sizes:
        parameters, gradients, state, tensors, summed_once, largest, sent, borrowed = self.weights(form)
        activation, shared, inputs, outputs, loose_input, loose_output, recomputed = (
            self.amount(form, key, examples) for key in AMOUNTS
        )
        held = range_sums(activation - shared)
        held += np.append(shared + loose_input, 0.0)[:, None]
        held += np.concatenate([[0.0], loose_output])[None, :]
        return Sizes(
            parameters, gradients, state, tensors, held,
            range_max(np.maximum(0.0, recomputed)) if recomputed.any() else np.zeros_like(held),
            summed_once, largest, sent, borrowed, np.append(inputs, 0.0), np.concatenate([[0.0], outputs]),
        )  # fmt: skip

    def _intra_stage(
        self,
        mesh: Mesh,
        pipeline: int,
        placement: tuple[int, ...],
        worker: int,
        form: LayerForm,
        examples: float,
        hides: bool,
    ) -> tuple[Numbers, Numbers]:
        layers, place = self.layers(form), self.places(mesh, pipeline, placement)
        links, counted = place.weights[worker], self.is_counted(form)
        forward, backward = self.exchanges_of(form, links, examples, place.gamma)
        if hides and counted:
            hidden = self.hidden_seconds(form, links, examples, place.machines[worker], place.gamma)
            forward, backward = forward - hidden[0], backward - hidden[1]
        again = forward if form.recompute == "full" and not counted else 0.0
        if mesh.space != (1, 1):
            halos = halo_seconds(layers, self.sides, mesh.space, place.slabs[worker], examples)
            forward, backward = (seconds + each for seconds, each in zip((forward, backward), halos, strict=True))
            again = again + np.array(halos[0]) if form.recompute == "full" else again
        return forward, backward + again

    def exchanges_of(
        self, form: LayerForm, links: Sequence[Link], examples: float, gamma: float
    ) -> tuple[Numbers, Numbers]:
        """`tensor_seconds` of a layer, computed once for each form."""
        key = (tuple(map(id, links)), form, examples, gamma)
        if key not in self.exchanges:
            self.exchanges[key] = self.tensor_seconds(form, links, examples, gamma)
        return self.exchanges[key]

    def hidden_seconds(
        self, form: LayerForm, links: Sequence[Link], examples: float, kinds: Sequence[DeviceKind], gamma: float
    ) -> tuple[Numbers, Numbers]:
        """Seconds of each layer's exchanges that pass while it computes, in a forward and in a backward.

        No more than its products take, from which moving them takes a share of the device.
        """
        rows, indices = self.distinct(form)
        times = [LayerTimes(*self.layer_rows(kind, form, examples).T) for kind in kinds]
        products = np.minimum.reduce([np.maximum(0.0, each.backward - each.input_gradient) for each in times])
        hidden = [hidden_exchanges(row, full=form.recompute == "full") for row in rows]
        beside_each = (
            np.array([exchange_seconds(works, links, form.tensor, examples, gamma) for works in works_of])[indices]
            for works_of in zip(*hidden, strict=True)
        )
        seconds: Numbers = sum(np.minimum(seconds, products) for seconds in beside_each)
        return np.zeros_like(products), (1 - share_kept_busy(links)) * seconds

    def is_counted(self, form: LayerForm) -> bool:
        """Whether the exchanges of processes that share layers were counted, with those of recomputed layers."""
        layers, _ = self.distinct(form)
        return form.tensor > 1 and all(layer.forward_exchanges is not None for layer in layers)

    def tensor_seconds(
        self, form: LayerForm, links: Sequence[Link], examples: float, gamma: float
    ) -> tuple[Numbers, Numbers]:
        """Seconds of each layer's exchanges among processes that share its weights, in a forward and in a backward."""
        layers, (rows, indices) = self.layers(form), self.distinct(form)
        if form.tensor == 1:
            return np.zeros(len(layers)), np.zeros(len(layers))
        if self.is_counted(form):
            forward, backward = (
                np.array([exchange_seconds(works or (), links, form.tensor, examples, gamma) for works in passes])
                for passes in zip(*((x.forward_exchanges, x.backward_exchanges) for x in rows), strict=True)
            )
            return forward[indices], backward[indices]
        num_all_reduces = np.array([num_all_reduces_of(layer) for layer in self.problem.layers], dtype=float)
        outputs, inputs = (
            np.array([getattr(layer, key).at(examples) for layer in layers]) for key in ("output", "input")
        )
        forward = num_all_reduces * all_reduce(links, form.tensor, outputs, gamma)
        backward = num_all_reduces * all_reduce(links, form.tensor, inputs, gamma)
        return forward, backward

    def _weight_messages(self, replicas: "Replicas", form: LayerForm) -> "WeightMessages":
        weights, gradients, _, tensors, *_ = self.weights(form)
        return WeightMessages(
            gradient_sum(replicas.links, replicas.data, gradients, tensors, replicas.gamma),
            gathering(replicas.links, replicas.data, weights),
            scattering(replicas.links, replicas.data, gradients, replicas.gamma),
        )

    def message_share(self, form: LayerForm) -> float:
        """The share of a message between stages that each of the processes sends which share the stage.

        Networks that are only planned: as Megatron sends them (Narayanan et al. 2021, section 4.1), each a part, which
        the receivers gather; on parts of the sequence a message is a part anyway.
        """
        divided = not self.problem.trained and self.is_counted(form) and form.space == (1, 1) and not form.sequence
        return 1 / form.tensor if divided else 1.0


def unnamed(layer: LayerCost) -> Hashable:
    """Equal for layers that differ in their names alone, if they share the objects of their work."""
    return tuple(
        id(value) if isinstance(value, tuple) else value for key, value in vars(layer).items() if key != "name"
    )


def all_keeping_inputs(layers: Sequence[LayerCost]) -> list[LayerCost]:
    """`keeping_inputs` of each; works of layers that are alike stay one object."""
    known: dict[Hashable, LayerCost] = {}
    kept = []
    for layer in layers:
        key = unnamed(layer)
        if key not in known:
            known[key] = keeping_inputs(layer)
        kept.append(replace(known[key], name=layer.name))
    return kept


Distinct = Callable[[LayerForm], tuple[list[LayerCost], NDArray[np.intp]]]


def machines_of(problem: Problem, kinds: Sequence[DeviceKind], dtype: str, *, on_chip: bool = False) -> list[Machine]:
    """The machines of kinds of devices, each once."""
    found = [(problem.cluster.devices_by_kind[kind.worker], kind.crowded) for kind in dict.fromkeys(kinds)]
    return [Machine(device.on_chip if on_chip else device, dtype, crowded) for device, crowded in found]


def slowest(kinds: Sequence[DeviceKind]) -> float:
    """How many times as long the slowest of some kinds of devices takes as its kind on average."""
    return max(kind.slowest for kind in kinds)


class StepTables:
    """Steps of a problem's optimizer; `distinct` gives the layers of a form that differ, and which of them each is."""

    def __init__(self, problem: Problem, dtype: str, distinct: Distinct) -> None:
        self.problem = problem
        self.dtype = dtype
        self.distinct = distinct
        self.cure = lru_cache(maxsize=256)(self._cure)
        self.orthogonalising = lru_cache(maxsize=256)(self._orthogonalising)

    @cached_property
    def stepping(self) -> Stepping:
        """How the optimizer steps: with float32 masters its passes over numbers take longer."""
        problem = self.problem
        if not problem.masters:
            return Stepping(problem.optimizer)
        longer = step_factor(problem.optimizer, self.dtype) if problem.weight_products else 2.0
        return Stepping(problem.optimizer, longer, masters=True)

    def _cure(self, cure: StepCure, kinds: tuple[DeviceKind, ...], form: LayerForm) -> tuple[Table, Table]:
        # Seconds that a cure adds to a step of the layers [i, j), on the slowest of some kinds of devices, and bytes
        # that it keeps of their matrices.
        def seconds(layer: LayerCost, machine: Machine) -> float:
            return cure_seconds(cure, layer, machine, self.stepping).mean(cure)

        return self._longest(seconds, kinds, form), self._sums(
            lambda layer: matrix_bytes(cure, layer, self.stepping), form
        )

    def of_shares(
        self, update: Table, kinds: tuple[DeviceKind, ...], form: LayerForm, replicas: Sequence[Link], data: int
    ) -> Table:
        """Seconds of an update in which each of `data` replicas steps its shares of weights.

        Muon gathers the step of each hidden matrix, and orthogonalises it in every replica.
        """
        if optimizer_of(self.problem.optimizer).on_matrices != "orthogonalise":
            return update / data
        products, num_bytes = self.orthogonalising(kinds, form)
        products = np.minimum(products, update)
        return (update - products) / data + products + gathering(replicas, data, num_bytes)

    def _orthogonalising(self, kinds: tuple[DeviceKind, ...], form: LayerForm) -> tuple[Table, Table]:
        # Seconds of Muon's products for the layers [i, j), and bytes of their hidden matrices.
        chosen = optimizer_of(self.problem.optimizer)
        item = 4 if self.problem.masters else BYTES.get(self.dtype, 4)

        def seconds(layer: LayerCost, machine: Machine) -> float:
            return matrix_seconds(layer, chosen, machine)

        return self._longest(seconds, kinds, form), self._sums(lambda layer: item * layer.matrices.hidden, form)

    def _longest(self, seconds: Callable[..., float], kinds: tuple[DeviceKind, ...], form: LayerForm) -> Table:
        # The sums of a layer's seconds over the layers [i, j), on the slowest of some kinds of devices.
        tables = [
            self._sums(partial(seconds, machine=machine), form)
            for machine in machines_of(self.problem, kinds, self.dtype)
        ]
        longest: Table = slowest(kinds) * np.maximum.reduce(tables)
        return longest

    def _sums(self, value: Callable[[LayerCost], float], form: LayerForm) -> Table:
        # The sums of a layer's values over the layers [i, j).
        layers, indices = self.distinct(form)
        return range_sums(np.array([value(layer) for layer in layers])[indices])
