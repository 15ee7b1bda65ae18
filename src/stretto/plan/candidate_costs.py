"""The closed forms of a candidate's costs, for every way to cut its layers: tables that `partition` reads.

In the code, `c` is a candidate, `s` one of its stages, and a table has at [i, j] the value of a stage with the layers
[i, j). For stage s of S, with M micro-batches a turn on W workers:

    forward    = sum F                        + all-reduces of outputs inside the stage + halos + gathered weights
    backward   = sum B; W if the stage sends  + all-reduces of input gradients + halos + gathered weights, scattered
                 no gradient; I + W if split      gradients + forward if recomputed + accumulation if M > 1
                 both: + the runtime's own time of each action + sending and receiving its messages
    x          = the transit of a message to stage s + 1, as long as of one back: the time that keeps neither end busy
    end        = the replicas' all-reduce (or sharding's scatter and gather), a tensor axis's sum of norms' gradients
                 where it divides the sequence + update + a copy of weights still in use
                 + the runtime's own time of an action and, divided among a worker's stages, of a turn and its losses
    turn       = forward + backward + 2x      messages exposed: 1f1b, zb-h1, interleaved, pipedream and its kin
                 max(forward, x) + max(backward, x)      streamed: gpipe
                 max(forward + backward, x)              hidden: the PB clock, zb-h2, zb-v, dualpipe-v, methods with
                                                                 losses of their own

    step       = sum fill + max((M - 1) turn + end), fill = forward + backward + 2x      synchronous
                 sum bubble + 2x + max(M turn + end)                                    zb-h1, zb-h2; the bubble of all
                     stages but the first is the method's gap if M >= S, else forward + backward
                 max mean((M v + W - 1) turn + v end)                                   interleaved, v stages a worker
                 max mean(phase(forward) + phase(backward) + v end)                     looped-bfs
                     phase(t) = (v - 1) max(M max(t, x), W (t + x)) + (M - 1) max(t, x) + W t + (W - 1) x
                 max mean(2 M turn + (W - 1)(gap + 5x) + 2 end)                         zb-v, dualpipe-v
                     max mean: the largest of all workers' means over their own stages
                 max(M turn + end)                                                      without a drain
                 max over stages, sum of the turns from it up to its chunk's end + end  chunked
                     turn = forward + backward + 2x within a chunk, hidden at its end
                 max(forward + 2x + W + end + forward and I of the stage above)         overlapping(delay=0)
                 max over stages and k, (turn + end + sum of the next k stages'         synthetic-gradients
                     forward + backward + L and the 2x below each) / (1 + k delay); its end includes L

A gap is the largest of a method's sums of F, I and W (`Planning.gap`), fitted to simulations and tested against them.
For equal stages the synchronous formulas are the schedules' exact times, (M + S - 1) turn + end; zb-h2's is the time
from step to step, since one begins before the last worker has ended the one before, and dualpipe-v's is longer by F at
most, and by a transit for each further worker. Unequal stages take no longer where a worker has one, but for messages
that wait for each other. Where it has several, their mean counts: a long one (the logits') makes others wait only while
it runs. Stages that differ by a tenth then take 4 % longer at most, or less. The formulas without a drain are exact for
any stages if messages take no longer than the work that hides them; those of chunked and overlapping are exact for any
messages. Where gradients are predicted, B includes a forward of the module that does, and L takes its backward and its
update; a stage waits where the gradient to learn from comes later than its own turns. That is exact for any stages, and
for any messages if the delay is 1, else for those that take no longer than a turn. Memory of a stage:

    versions x weights + gradients + optimizer state (divided among replicas as far as they are sharded)
    + copies of weights that predictions and corrections keep
    + held x activations
    + delay x (output, and the graph of its predicted gradient), of a stage that learns to predict one
    + of weights that another stage owns, those of the modules themselves, and one gradient to send there
    + what is recomputed at a time: by the layer that recomputes most, or by the whole stage; of a worker's stages, by
      the one that needs most

Energy of a step: every device's power while it waits, times the step, plus what it uses more while it is busy, times

    busy       = M (forward + backward) + end      of each of its stages: computing, communicating inside the stage and
                 with replicas, sending and receiving; not the bubble and not the transit of messages
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stretto.cost.attained import AUTOCAST
from stretto.cost.cluster import Cluster, Link
from stretto.cost.collective import GRADIENTS, RESHARDING, SHARDING, TENSOR_SUM
from stretto.cost.cure_costs import PLAIN, feedback_tensors
from stretto.cost.layer_table import LayerCost, ModelCosts, keeping_inputs
from stretto.cost.mixed_precision import sum_seconds
from stretto.cost.predicted_gradients import graph_of, learn_seconds
from stretto.cost.shared_weights import Use, borrow
from stretto.cost.stage_prediction import LayerTimes, Machine, layer_times, with_head
from stretto.mesh import Mesh
from stretto.plan.hidden_exchanges import hidden_exchanges, share_kept_busy
from stretto.plan.partition import WaitForm
from stretto.plan.places import (
    DeviceKind,
    Numbers,
    Places,
    all_reduce,
    exchange_seconds,
    gathering,
    gradient_sum,
    measured_seconds,
    message,
    receiving,
    scattering,
    sending,
)
from stretto.plan.planned_methods import planned, reach_of
from stretto.plan.problem import SHARD_OPTIMIZER, Form, Problem, merged
from stretto.plan.range_tables import Table, range_max, range_sums
from stretto.plan.search_space import Candidate, flow_of
from stretto.plan.split_layer_costs import halo_seconds, layer_parts, num_all_reduces_of
from stretto.plan.step_tables import StepTables
from stretto.plan.ways import correction

Times = LayerTimes[Table]  # of the layers [i, j) as one stage, at [i, j]; per micro-batch, `update` per turn


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


class StageTable(NamedTuple):
    """The costs of a stage that holds the layers [i, j), at [i, j].

    Seconds of a micro-batch: `forward` and `backward` include `intra_forward` and `intra_backward`, the communication
    among processes that share the stage; `forward_gather` and `backward_gather`, gathering sharded weights and
    scattering gradients; `recompute`, the second forward, of whole stages, or of layers once numbers stand instead of
    tables; `message_overhead`, sending and receiving;
    `action_overhead`, the runtime's own time. `deferrable` is the part of the backward that can fill a bubble: W.
    `transit` is the part of a message to the next stage that keeps neither end busy.

    Seconds of a turn: `learn`, learning to predict a gradient, `all_reduce` among replicas, and of norms' gradients on
    a divided sequence, `update`, `loss_overhead` (sending and receiving losses), and `turn_overhead`, the runtime's own
    time.

    Bytes: `static_bytes` always, `microbatch_bytes` for each micro-batch held, `recompute_bytes` for the one that is
    recomputed.
    """

    forward: Table
    backward: Table
    learn: Table
    intra_forward: Table
    intra_backward: Table
    forward_gather: Table
    backward_gather: Table
    recompute: Table
    message_overhead: Table
    action_overhead: Table
    deferrable: Table
    transit: Table
    all_reduce: Table
    update: Table
    loss_overhead: Table
    turn_overhead: Table
    static_bytes: Table
    microbatch_bytes: Table
    recompute_bytes: Table

    @property
    def end(self) -> Table:
        """Seconds at the end of a turn."""
        return self.learn + self.all_reduce + self.update + self.loss_overhead + self.turn_overhead


class Row(NamedTuple):
    """A stage's tables for `partition`: seconds that it adds to the fill, seconds of its load, and its bytes.

    A worker has the `kept` bytes of all its stages at a time, the `passing` ones of one of them. `busy` are the seconds
    of a step in which it keeps its worker busy.
    Under methods whose stages wait for the one above them in every turn, `beside_wait` are a stage's seconds without
    that wait, `awaited` the seconds that the stage below waits for it, and `transits` those of the messages to and from
    the stage above where `beside_wait` does not have them; else None.
    """

    fill: Table
    load: Table
    kept: Table
    passing: Table
    busy: Table
    beside_wait: Table | None = None
    awaited: Table | None = None
    transits: Table | None = None

    @property
    def bytes(self) -> Table:
        """The bytes of a worker that has this stage alone."""
        return self.kept + self.passing


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


class Prices:
    """The costs of all candidates of a problem; tables that several candidates share are computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = problem.dtype or problem.costs.dtype
        self.sides = problem.sides or (0,) * len(problem.layers)
        self.places = lru_cache(maxsize=None)(self._places)
        self.layers = lru_cache(maxsize=None)(self._layers)
        self.distinct = lru_cache(maxsize=None)(self._distinct)
        self.layer_rows = lru_cache(maxsize=None)(self._layer_rows)
        self.least_rows = lru_cache(maxsize=None)(self._least_rows)
        self.intra_stage = lru_cache(maxsize=1024)(self._intra_stage)
        self.exchanges: dict[Hashable, tuple[Numbers, Numbers]] = {}
        self.weight_messages = lru_cache(maxsize=256)(self._weight_messages)
        self.times = lru_cache(maxsize=256)(self._times)
        self.lines = lru_cache(maxsize=None)(self._lines)
        self.weights = lru_cache(maxsize=None)(self._weights)
        self.sizes = lru_cache(maxsize=256)(self._sizes)
        self.loss_seconds = lru_cache(maxsize=None)(self._loss_seconds)
        self.hides_exchanges = not problem.trained and problem.program.exchanges != "waited"  # of a tensor axis
        self.steps = StepTables(problem, self.dtype, self.distinct)
        self.borrowing = lru_cache(maxsize=None)(self._borrowing)
        self.borrowings = lru_cache(maxsize=1024)(self._borrowings)
        self.valid = np.triu(np.ones((len(problem.layers) + 1,) * 2, dtype=bool), 1)

    def _places(self, mesh: Mesh, pipeline: int, placement: tuple[int, ...] = ()) -> Places:
        return Places.of(self.problem.cluster, mesh, pipeline, placement)

    def _borrowing(self, uses: tuple[Use, ...]) -> "Prices":
        # The costs where layers borrow shared weights of another stage.
        if not uses:
            return self
        problem = self.problem
        return Prices(
            problem.but(
                costs=borrow(problem.costs, uses),
                tensor_costs={key: borrow(costs, uses) for key, costs in problem.tensor_costs.items()},
                form_costs={key: borrow(costs, uses) for key, costs in problem.form_costs.items()},
            )
        )

    @cached_property
    def least(self) -> "Prices":
        """The costs where all layers that share weights only read them: no more than those of any stage's layers."""
        if self.as_large_models and not any(planned(name).family == "local" for name in self.problem.names):
            return self
        return self.borrowing(tuple(Use(shared, shared, trains=False) for shared in self.shared))

    @cached_property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """The layers that share weights, each group of them once."""
        return tuple(dict.fromkeys(tie.layers for tie in self.problem.costs.ties))

    def _borrowings(
        self, method: str, stages: int, losses: int, s: int
    ) -> tuple[tuple[tuple[Use, ...], NDArray[np.bool_]], ...]:
        # The uses of borrowed weights by stage s where it holds [i, j), and at which [i, j): later ones count. Whether
        # it trains a weight may depend on the stage that owns it; what its owner may be decides, in favour of training.
        tried, heads = planned(method), self.problem.heads_of(method)
        flow = flow_of(method, stages, losses)
        if not self.shared or (self.as_large_models and not (flow.heads or flow.predicted)):
            return ()  # a single loss: each stage steps a copy of its own
        if heads is not None and heads.from_last:
            return tuple(
                (tuple(borrowed(shared, max(shared), trains=True) for shared in self.shared if max(shared) >= cut),
                 np.broadcast_to(np.arange(len(self.valid)) <= cut, self.valid.shape))
                for cut in sorted(set(map(max, self.shared)), reverse=True)
            )  # fmt: skip
        reach = reach_of(tried, stages, losses)

        def trains(owner: int) -> bool:
            return any(reach.trains_all_of(stage, s) for stage in range(min(s - 1, owner) + 1))

        return tuple(
            (tuple(borrowed(shared, min(shared), trains=trains(min(shared)))
                   for shared in self.shared if min(shared) <= cut),
             np.broadcast_to((np.arange(len(self.valid)) > cut)[:, None], self.valid.shape))
            for cut in sorted(set(map(min, self.shared)))
        )  # fmt: skip

    def correction(self, c: Candidate) -> float:
        """What the seconds of a candidate's step are multiplied by, as whole steps were measured; 1 if none were."""
        return correction(c, self.problem.ratios) if self.problem.ratios else 1.0

    def places_of(self, c: Candidate) -> Places:
        """The devices and links that a candidate runs on."""
        return self.places(c.mesh, c.pipeline, c.placement)

    def _layers(self, form: Form) -> list[LayerCost]:
        if form.recompute == "full":
            return list(merged(self.rows(form)))
        whole, counted = self.problem.whole_costs(form), self.problem.counted_costs(form)
        shared = None if counted is None else merged(counted.layers)
        return layer_parts(merged(whole.layers), form.tensor, form.space, self.sides, shared)

    def rows(self, form: Form) -> tuple[LayerCost, ...]:
        """The cost of one process's part of each layer, the loss apart."""
        whole, counted = self.problem.whole_costs(form), self.problem.counted_costs(form)
        sides = (*self.sides, *[0] * (len(whole.layers) - len(self.sides)))
        shared = None if counted is None else counted.layers
        parts = layer_parts(whole.layers, form.tensor, form.space, sides, shared)
        return tuple(all_keeping_inputs(parts) if form.recompute == "full" else parts)

    def seconds(
        self, layers: Sequence[LayerCost], kinds: Sequence[DeviceKind], examples: float, *, on_chip: bool = False
    ) -> Table:
        """Seconds of layers on the slowest of several kinds of devices: [layers, 6], columns as in `LayerTimes`."""
        costs = ModelCosts(tuple(layers), self.dtype)
        machines = [
            Machine(device.on_chip if on_chip else device, self.dtype, kind.crowded)
            for kind in kinds
            for device in [self.cluster.devices_by_kind[kind.worker]]
        ]
        rows: Table = np.maximum.reduce([
            kind.slowest * self.seconds_on(layers, costs, machine, examples)
            for kind, machine in zip(kinds, machines, strict=True)
        ])  # fmt: skip
        return rows

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster, its devices as the program's kernels find them."""
        cluster = self.problem.cluster
        if not self.as_large_models:
            return cluster
        devices = {
            name: device if device.attained is None
            else replace(device, attained=self.problem.program.attains(device.attained))
            for name, device in cluster.devices.items()
        }  # fmt: skip
        return replace(cluster, devices=devices)

    def seconds_on(self, layers: Sequence[LayerCost], costs: ModelCosts, machine: Machine, examples: float) -> Table:
        """Seconds of layers on one machine, as `seconds`."""
        rows = np.array(layer_times(costs, machine, examples, optimizer=self.steps.stepping))
        if self.sums_as_large_models:
            in_products = self.problem.program.sums_in_products
            rows[:, ACCUMULATE] = [sum_seconds(layer, machine, examples, in_products=in_products) for layer in layers]
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

    def _distinct(self, form: Form) -> tuple[list[LayerCost], NDArray[np.intp]]:
        # The layers that differ in more than their names, and for each layer which of them it is.
        layers, places = self.layers(form), dict[Hashable, int]()
        indices = [places.setdefault(unnamed(layer), len(places)) for layer in layers]
        firsts = [indices.index(place) for place in range(len(places))]
        return [replace(layers[first], name="") for first in firsts], np.array(indices)

    def _layer_rows(self, kind: DeviceKind, form: Form, examples: float) -> Table:
        if kind.slowest != 1:
            return kind.slowest * self.layer_rows(kind.on_average, form, examples)
        layers, indices = self.distinct(form)
        rows: Table = self.seconds(layers, [kind], examples)[indices]
        return rows

    def _least_rows(self, kind: DeviceKind, form: Form, examples: float) -> Table:
        if not self.stays_on_chip(kind):
            return self.layer_rows(kind, form, examples)
        return self.seconds(self.layers(form), [kind], examples, on_chip=True)

    def stays_on_chip(self, kind: DeviceKind) -> bool:
        """Whether a kind of device has a memory on its chip."""
        return self.problem.cluster.devices_by_kind[kind.worker].on_chip_memory is not None

    def _times(self, kind: DeviceKind, form: Form, examples: float) -> Times:
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
        layers, costs = LayerTimes(*rows.T), self.problem.costs
        weight_gradient = weight_gradients_of(layers.weight_gradient, layers.backward)
        backward, input_gradient = range_sums(layers.backward), range_sums(layers.input_gradient)
        backward[0], input_gradient[0] = weight_gradient[0], 0.0  # stage 0 computes no gradient of its input
        if self.problem.weight_products:
            weight_gradient = backward - input_gradient

        def plus(table: Table, seconds: float) -> Table:
            return np.where(table > 0, table + seconds, table)

        return Times(
            forward=range_sums(layers.forward),
            backward=plus(backward, costs.start / speed),
            input_gradient=plus(input_gradient, costs.start / speed),
            weight_gradient=plus(weight_gradient, costs.start / speed),
            update=plus(range_sums(layers.update), costs.step / speed),
            accumulate=range_sums(layers.accumulate),
        )

    def slowest(self, c: Candidate, worker: int) -> Times:
        """Times on the slowest of the devices that hold a worker's replicas."""
        kinds = self.places_of(c).machines[worker]
        times = [self.times(kind, c.form, c.examples) for kind in kinds]
        return times[0] if len(times) == 1 else Times(*map(np.maximum.reduce, zip(*times, strict=True)))

    def _loss_seconds(self, mesh: Mesh, pipeline: int, placement: tuple[int, ...], last: int) -> tuple[float, ...]:
        workers = self.places(mesh, pipeline, placement).workers
        return tuple(workers.losses(worker, last) for worker in range(pipeline))

    def _lines(self, form: Form) -> dict[str, tuple[Numbers, Numbers]]:
        # The fixed bytes of each layer, and those for each example, by name.
        layers, indices = self.distinct(form)
        lines = {key: [getattr(layer, key) for layer in layers] for key in AMOUNTS}
        return {
            key: (np.array([line.fixed for line in each])[indices], np.array([line.each for line in each])[indices])
            for key, each in lines.items()
        }

    def amount(self, form: Form, key: str, examples: float) -> Numbers:
        """An amount of bytes of each layer, by its name in `LayerCost`."""
        fixed, each = self.lines(form)[key]
        return fixed + examples * each

    def _weights(self, form: Form) -> tuple[Table, ...]:
        # What of the sizes does not depend on examples.
        layers, indices = self.distinct(form)
        amounts = [
            (x.parameter_bytes, x.gradient_bytes, self.problem.state(x), x.parameter_tensors, x.summed_once,
             x.sent_gradients)
            for x in layers
        ]  # fmt: skip
        weights, gradients, state, tensors, once, sent = np.array(amounts, dtype=float)[indices].T
        more, more_gradients, more_tensors, borrowed = self.repeats(form)
        more_of_all = more, more_gradients, self.problem.state_of_repeated * more_gradients, more_tensors
        tables = zip((weights, gradients, state, tensors), more_of_all, strict=True)
        return (
            *(range_sums(values) - twice for values, twice in tables), range_sums(once), range_max(weights),
            range_sums(sent), borrowed,
        )  # fmt: skip

    def repeats(self, form: Form) -> tuple[Table, Table, Table, Table]:
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

    def _sizes(self, form: Form, examples: float) -> Sizes:
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
        self, mesh: Mesh, pipeline: int, placement: tuple[int, ...], worker: int, form: Form, examples: float,
        hides: bool,
    ) -> tuple[Numbers, Numbers]:  # fmt: skip
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

    def exchanges_of(self, form: Form, links: Sequence[Link], examples: float, gamma: float) -> tuple[Numbers, Numbers]:
        """`tensor_seconds`, computed once."""
        key = (tuple(map(id, links)), form, examples, gamma)
        if key not in self.exchanges:
            self.exchanges[key] = self.tensor_seconds(form, links, examples, gamma)
        return self.exchanges[key]

    def hidden_seconds(
        self, form: Form, links: Sequence[Link], examples: float, kinds: Sequence[DeviceKind], gamma: float
    ) -> tuple[Numbers, Numbers]:
        """Seconds of each layer's exchanges that pass while it computes, in a forward and in a backward.

        No more than its products take, from which moving them takes a share of the device. Programs that send parts of
        an exchange while others are computed wait for one of a ring's parts, 1 / P.
        """
        rows, indices = self.distinct(form)
        times = [LayerTimes(*self.layer_rows(kind, form, examples).T) for kind in kinds]
        free = 1 - share_kept_busy(links)
        if self.problem.program.exchanges == "in parts":
            part = free * (1 - 1 / form.tensor)
            forward, backward = self.exchanges_of(form, links, examples, gamma)
            return (
                part * np.minimum(forward, np.minimum.reduce([each.forward for each in times])),
                part * np.minimum(backward, np.minimum.reduce([each.backward for each in times])),
            )
        products = np.minimum.reduce([np.maximum(0.0, each.backward - each.input_gradient) for each in times])
        hidden = [hidden_exchanges(row, full=form.recompute == "full") for row in rows]
        beside_each = (
            np.array([exchange_seconds(works, links, form.tensor, examples, gamma) for works in works_of])[indices]
            for works_of in zip(*hidden, strict=True)
        )
        seconds: Numbers = sum(np.minimum(seconds, products) for seconds in beside_each)
        return np.zeros_like(products), free * seconds

    def is_counted(self, form: Form) -> bool:
        """Whether the exchanges of processes that share layers were counted, those of what is recomputed, too."""
        layers, _ = self.distinct(form)
        return form.tensor > 1 and all(layer.forward_exchanges is not None for layer in layers)

    def tensor_seconds(
        self, form: Form, links: Sequence[Link], examples: float, gamma: float
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

    def stage(self, c: Candidate, s: int) -> StageTable:
        """The costs of stage s for all [i, j)."""
        stage = self.stage_alone(c, s)
        for uses, where in self.borrowings(c.method, c.stages, c.losses, s):
            borrowing = self.borrowing(uses).stage_alone(c, s)
            stage = StageTable(*(np.where(where, *pair) for pair in zip(borrowing, stage, strict=True)))
        return stage

    def stage_alone(self, c: Candidate, s: int) -> StageTable:
        """The costs of stage s for all [i, j), as if it owned all shared weights that it has."""
        worker, places, versions = c.worker_of(s), self.places_of(c), c.planned.versions(c.stage_at(s))
        workers, stages_per_worker = places.workers, c.planning.stages_per_worker
        times, sizes = self.slowest(c, worker), self.sizes(c.form, c.examples)
        static, gradients, held = sizes.parameters * versions + sizes.state, sizes.gradients, sizes.held
        copies = c.planned.weight_copies(c.stage_at(s))
        static = static + self.beside_borrowed(c, s) + (copies.forward + copies.backward + copies.always) * gradients
        if s and not c.receives_gradient(s - 1):
            times = times._replace(backward=times.weight_gradient)
        if s in c.gradients.heads:
            head = self.head(c, s)
            times = with_head(times, head.times)
            twice = self.had_twice(c.method)
            static, gradients = static + head.static - twice, gradients + head.gradients
            held = held + head.held - twice
        learn = np.zeros_like(static)
        if s in c.gradients.predicted:
            forward, learn, bytes_of_predictor = self.predictor(c, s)
            times, static = times._replace(backward=times.backward + forward), static + bytes_of_predictor
        intra = self.intra_stage(
            c.mesh, c.pipeline, c.placement, worker, c.form, c.examples, self.hides_exchanges and not c.planning.split
        )
        intra_forward, intra_backward = (range_sums(values) for values in intra)
        backward = times.input_gradient + times.weight_gradient if c.planning.split and s else times.backward
        if c.microbatches > 1:
            backward = backward + self.accumulating(c, times.accumulate)
        zeros = np.zeros_like(intra_forward)
        again = times.forward + intra_forward if c.recomputes(s) else zeros
        of_input, of_output = self.gathered_messages(c, s, sizes)
        intra_forward, intra_backward = intra_forward + of_input[:, None], intra_backward + of_output
        copy = workers.copy_seconds(worker, 1.0) * gradients if versions > 1 else 0.0
        cure = c.planned.step_cure(c.stage_at(s))
        if cure != PLAIN:
            seconds, kept = self.steps.cure(cure, places.machines[worker], c.form)
            static = static + feedback_tensors(cure, self.steps.stepping) * gradients + kept
            times = times._replace(update=times.update + seconds)
        losses = self.loss_seconds(c.mesh, c.pipeline, c.placement, c.worker_of(c.stages - 1))[worker]
        computing = StageTable(
            forward=times.forward + intra_forward,
            backward=backward + intra_backward + again,
            learn=zeros + learn,
            intra_forward=intra_forward,
            intra_backward=intra_backward,
            forward_gather=zeros,
            backward_gather=zeros,
            recompute=again,
            message_overhead=zeros,
            action_overhead=zeros,
            deferrable=times.weight_gradient,
            transit=zeros + message(c.link(s, places), self.message_share(c.form) * sizes.output),
            all_reduce=self.summed_gradients(c, worker, gradients, sizes.tensors),
            update=times.update + copy,
            loss_overhead=zeros + losses / stages_per_worker,
            turn_overhead=zeros + workers.per_action(worker) + workers.per_step(worker) / stages_per_worker,
            static_bytes=static + gradients * (1 + self.has_buckets(c)),
            microbatch_bytes=zeros + sizes.input[:, None] if c.recomputes(s) else held,
            recompute_bytes=held if c.recomputes(s) else sizes.recomputed,
        )
        stage = computing if c.shard == "none" else self.with_sharding(c, s, computing)
        if c.sequence:
            stage = stage._replace(all_reduce=stage.all_reduce + self.summed_once(c, worker))
        return self.with_runtime(c, s, self.as_program_sums(c, stage))

    def beside_borrowed(self, c: Candidate, s: int) -> Table:
        """Bytes beside the borrowed weights that stage s computes with: its modules' own, and gradients to be sent.

        Stage 0 is taken for the owner: on its worker the modules' own are the owner's.
        """
        sizes = self.sizes(c.form, c.examples)
        return sizes.sent + sizes.borrowed * (c.worker_of(s) != c.worker_of(0))

    def has_buckets(self, c: Candidate) -> bool:
        """Whether a copy of all gradients is kept to sum them, in networks that are only planned."""
        return self.as_large_models and self.problem.program.buckets and c.mesh.data > 1

    def accumulating(self, c: Candidate, accumulate: Table) -> Table:
        """Seconds of adding gradients to earlier ones: to a shard alone in networks that are only planned."""
        return accumulate / c.mesh.data if self.as_large_models and c.shard.startswith("fully") else accumulate

    def as_program_sums(self, c: Candidate, stage: StageTable) -> StageTable:
        """The stage whose replicas meet when its program has them meet, in networks that are only planned.

        Sums beside a pass are hidden as far as one micro-batch computes: the last one's backward, and the next step's
        first forward, where weights are gathered.
        """
        if self.problem.program.replicas == "each micro-batch":
            return stage._replace(all_reduce=c.microbatches * stage.all_reduce)
        if self.problem.program.replicas == "beside a pass":
            return stage._replace(all_reduce=np.maximum(0.0, stage.all_reduce - stage.forward - stage.backward))
        return stage

    def summed_once(self, c: Candidate, worker: int) -> Table:
        """Seconds of the sum of those gradients that processes which divide the sequence have parts of: of norms."""
        places, num_bytes = self.places_of(c), self.sizes(c.form, c.examples).summed_once
        links = places.weights[worker]
        measured = measured_seconds(TENSOR_SUM, links, c.mesh.tensor, num_bytes)
        return all_reduce(links, c.mesh.tensor, num_bytes, places.gamma) if measured is None else measured

    def message_share(self, form: Form) -> float:
        """The share of a message between stages that each of the processes sends which share the stage.

        Networks that are only planned: as Megatron sends them (Narayanan et al. 2021, section 4.1), each a part, which
        the receivers gather; on parts of the sequence a message is a part anyway.
        """
        divided = not self.problem.trained and self.is_counted(form) and form.space == (1, 1) and not form.sequence
        return 1 / form.tensor if divided else 1.0

    def gathered_messages(self, c: Candidate, s: int, sizes: Sizes) -> tuple[Numbers, Numbers]:
        """Seconds in which the processes of a stage gather the parts of its input, and of its output's gradient."""
        places, nothing = self.places_of(c), np.zeros_like(sizes.input)
        if self.message_share(c.form) == 1:
            return nothing, nothing
        links, has_input, has_gradient = (
            places.weights[c.worker_of(s)], c.link(s - 1, places) is not None,
            c.link(s, places) is not None and c.receives_gradient(s),
        )  # fmt: skip
        return (
            gathering(links, c.mesh.tensor, sizes.input) if has_input else nothing,
            gathering(links, c.mesh.tensor, sizes.output) if has_gradient else nothing,
        )

    def summed_gradients(self, c: Candidate, worker: int, gradients: Table, tensors: Table) -> Table:
        """Seconds of the sums of gradients over replicas and slabs; slabs sum those of a layer in its backward."""
        places, slabs = self.places_of(c), c.mesh.space[0] * c.mesh.space[1]
        replicas, parts = places.replicas[worker], places.slabs[worker]
        if slabs == 1:
            if gradients is self.weights(c.form)[1]:  # without a head
                return self.weight_messages(Replicas(replicas, c.mesh.data, places.gamma), c.form).gradient_sum
            return gradient_sum(replicas, c.mesh.data, gradients, tensors, places.gamma)
        sums = tensors / TENSORS_OF_SUM
        on_slabs = measured_seconds(TENSOR_SUM, parts, slabs, gradients, calls=sums)
        if on_slabs is None:
            return gradient_sum((*replicas, *parts), c.mesh.data * slabs, gradients, tensors, places.gamma)
        return on_slabs + gradient_sum(replicas, c.mesh.data, gradients, tensors, places.gamma)

    def with_runtime(self, c: Candidate, s: int, stage: StageTable) -> StageTable:
        """The stage with the runtime's own time of its actions, and the time of sending and receiving its messages."""
        places, sizes = self.places_of(c), self.sizes(c.form, c.examples)
        per_action, below, above = places.workers.per_action(c.worker_of(s)), c.link(s - 1, places), c.link(s, places)
        share = self.message_share(c.form)
        inputs, outputs = share * sizes.input, share * sizes.output
        forward_messages = receiving(below, inputs)[:, None] + sending(above, outputs)
        send_gradient = sending(below, inputs)[:, None] * c.receives_gradient(s - 1)
        learns, to_learn_from = s in c.gradients.predicted, 0.0 * inputs
        receive_gradient = receiving(above, inputs) * c.receives_gradient(s)
        if learns:
            receive_gradient, to_learn_from = to_learn_from, receive_gradient
        num_backwards = c.num_backward_actions(s)
        num_actions = num_backwards + c.recomputes(s)
        # A stage with a head of its own sends that head's gradient down before it receives the one from above.
        deferred_receive = receive_gradient if num_backwards == 2 and not c.planned.drains else 0.0
        gradient_messages = send_gradient + receive_gradient
        return stage._replace(
            forward=stage.forward + forward_messages + per_action,
            backward=stage.backward + gradient_messages + num_actions * per_action,
            learn=stage.learn + to_learn_from + learns * per_action,
            message_overhead=stage.message_overhead + forward_messages + gradient_messages + to_learn_from,
            action_overhead=stage.action_overhead + (1 + num_actions + learns) * per_action,
            deferrable=stage.deferrable + deferred_receive + (per_action if num_backwards == 2 else 0.0),
        )

    def with_sharding(self, c: Candidate, s: int, stage: StageTable) -> StageTable:
        """The stage with its optimizer state, or weights and gradients too, sharded among replicas."""
        sizes, places, worker = self.sizes(c.form, c.examples), self.places_of(c), c.worker_of(s)
        beside = self.beside_borrowed(c, s)
        if c.shard == SHARD_OPTIMIZER:
            return stage._replace(
                all_reduce=self.scattered_and_gathered(c, worker, stage),
                update=stage.update / c.mesh.data,
                static_bytes=sizes.parameters + sizes.gradients + sizes.state / c.mesh.data + beside,
            )
        gather, scatter = self.sharding_messages(c, worker, stage)
        kinds, replicas = places.machines[worker], places.replicas[worker]
        update = self.steps.of_shares(stage.update, kinds, c.form, replicas, c.mesh.data)
        update = np.maximum(update, self.launches(c, worker, sizes.tensors))
        if c.shard == "fully-shard":
            static = sizes.parameters + sizes.gradients + (sizes.parameters + sizes.state) / c.mesh.data
            return stage._replace(all_reduce=gather + scatter, update=update, static_bytes=static)
        recompute_gather = gather * c.recomputes(s)
        return stage._replace(
            forward=stage.forward + gather,
            backward=stage.backward + gather + scatter + recompute_gather,
            forward_gather=gather,
            backward_gather=gather + scatter,
            recompute=stage.recompute + recompute_gather,
            all_reduce=np.zeros_like(update),
            update=update,
            static_bytes=(sizes.parameters + sizes.gradients + sizes.state) / c.mesh.data + 2 * sizes.largest,
        )

    def scattered_and_gathered(self, c: Candidate, worker: int, stage: StageTable) -> Table:
        """Seconds of scattering gradients before an update, and of gathering weights after it.

        Where collectives were measured as training runs them: those of the sum of gradients, which sends as many bytes.
        """
        places = self.places_of(c)
        links, data = places.replicas[worker], c.mesh.data
        if any(GRADIENTS in link.collectives for link in links):
            return stage.all_reduce
        _, gather, scatter = self.weight_messages(Replicas(links, data, places.gamma), c.form)
        return gather + scatter

    def _weight_messages(self, replicas: "Replicas", form: Form) -> "WeightMessages":
        weights, gradients, _, tensors, *_ = self.weights(form)
        return WeightMessages(
            gradient_sum(replicas.links, replicas.data, gradients, tensors, replicas.gamma),
            gathering(replicas.links, replicas.data, weights),
            scattering(replicas.links, replicas.data, gradients, replicas.gamma),
        )

    def launches(self, c: Candidate, worker: int, tensors: Table) -> Table:
        """Seconds in which a worker's host starts the updates of so many tensors, however small their shards are."""
        attained = [device.attained for device in self.places_of(c).workers.devices(worker)]
        return tensors * max(0.0 if each is None else each.per_launch for each in attained)

    def sharding_messages(self, c: Candidate, worker: int, stage: StageTable) -> tuple[Table, Table]:
        """Seconds of gathering sharded weights once, and of scattering their gradients."""
        places, sizes = self.places_of(c), self.sizes(c.form, c.examples)
        links, data, again = places.replicas[worker], c.mesh.data, c.shard == "fully-shard(reshard=True)"
        longer = measured_seconds(
            RESHARDING if again else SHARDING, links, data, sizes.gradients, tensors=sizes.tensors
        )
        if longer is None:
            return self.weight_messages(Replicas(links, data, places.gamma), c.form)[1:]
        # Measured all together, beside a meeting of replicas; each has about as many bytes.
        part = (stage.all_reduce + longer) / (3 if again else 2)
        return part, part

    def had_twice(self, method: str) -> Table:
        """Bytes of weights that both the layers [i, j) and a head behind them that trains later layers have."""
        heads, found = self.problem.heads_of(method), np.zeros(self.valid.shape)
        if heads is None or not heads.trains:
            return found
        layers = np.arange(len(self.valid) - 1)
        for tie in self.problem.costs.ties:
            above = max({*heads.read} & {*tie.layers}, default=-1) >= np.arange(len(self.valid))
            found += tie.bytes * (range_sums(np.isin(layers, tie.layers).astype(float)) > 0) * above
        return found

    def head(self, c: Candidate, s: int) -> "Head":
        """The costs of stage s's head behind layer j - 1, at [0, j]; infinite memory where there can be none."""
        costs, worker = self.problem.heads_of(c.method), c.worker_of(s)
        assert costs is not None, "methods with heads are tried only where their costs are known"
        given = costs.behind(s, c.stages)
        some = next(head for head in (*given, *costs.rows) if head is not None)
        heads = [some if head is None else head for head in given]
        missing = np.array([inf if head is None else 0.0 for head in given])
        rows = self.seconds(heads, self.places_of(c).machines[worker], c.examples)

        def at_end(values: Sequence[float] | Numbers) -> Table:
            table: Table = np.concatenate([[0.0], np.asarray(values)])[None, :]
            return table

        return Head(
            Times(*map(at_end, rows.T)),
            at_end(missing + np.array([head.parameter_bytes + self.problem.state(head) for head in heads])),
            at_end([head.gradient_bytes for head in heads]),
            at_end([head.activation.at(c.examples) for head in heads]),
            at_end([graph_of(head).at(c.examples) for head in heads]),
        )

    def predictor(self, c: Candidate, s: int) -> tuple[Table, Table, Table]:
        """What predicts the gradient of stage s: seconds that B takes longer, those of L, and bytes.

        From B to L it keeps the stage's output, and the prediction's graph where that serves for L.
        """
        head, prediction = self.head(c, s), c.planned.method.prediction
        assert prediction is not None, "the method says how predictions learn"
        keeps, outputs = prediction.keeps_graph, self.sizes(c.form, c.examples).output
        kept = prediction.delay * (outputs + keeps * head.graph)
        return head.times.forward, learn_seconds(head.times, keeps_graph=keeps), head.static + kept

    def tables(self, c: Candidate) -> list[Row]:
        """The row of every stage; loads are infinite where the worker's memory is too small."""
        place, method, rows = self.places_of(c), c.planned, []
        heads = c.gradients.heads | c.gradients.predicted
        planning, last = method.planning, c.stages - 1
        losses = self.loss_seconds(c.mesh, c.pipeline, c.placement, c.worker_of(last))
        known: dict[Hashable, tuple[StageTable, Table, Table, Table]] = {}
        of_stage: dict[Hashable, Row] = {}
        for s in range(c.stages):
            worker, stage_at = c.worker_of(s), c.stage_at(s)
            key = (
                place.machines[worker],
                *(tuple(map(id, links[worker])) for links in (place.replicas, place.weights, place.slabs)),
                id(c.link(s - 1, place)), id(c.link(s, place)), c.receives_gradient(s - 1), c.receives_gradient(s),
                losses[worker], s == 0, s == last, method.versions(stage_at), c.recomputes(s),
                self.problem.head_variant(c.method, s, c.stages) if s in heads else None, method.step_cure(stage_at),
                method.weight_copies(stage_at),
                tuple(uses for uses, _ in self.borrowings(c.method, c.stages, c.losses, s)),
            )  # fmt: skip
            if key not in known:
                stage = self.stage(c, s)
                fill, load = fill_and_load(c, s, stage)
                busy = c.microbatches * (stage.forward + stage.backward) + stage.end
                fill, load, busy = (np.where(self.valid, table, inf) for table in (fill, load, busy))
                known[key] = stage, fill, load, busy
            stage, fill, load, busy = known[key]
            held, memory = planning.held(stage_at), place.memory[worker]
            place_key = (key, held, memory, None if self.problem.begins is None else s)
            if place_key not in of_stage:
                allowed = self.valid if self.problem.begins is None else self.valid & self.stands(s)
                kept = np.where(allowed, stage.static_bytes + held * stage.microbatch_bytes, inf)
                wait = wait_terms(c, s, stage) if planning.waits else (None, None, None)
                fits = (kept + stage.recompute_bytes <= memory) & np.isfinite(kept)
                of_stage[place_key] = Row(fill, np.where(fits, load, inf), kept, stage.recompute_bytes, busy, *wait)
            rows.append(of_stage[place_key])
        return rows

    def stands(self, s: int) -> NDArray[np.bool_]:
        """The layers [i, j) that stage s has where it is given which ones stages begin with."""
        ends = (*(self.problem.begins or ()), len(self.valid) - 1)
        stands: NDArray[np.bool_] = np.zeros_like(self.valid)
        stands[ends[s], ends[s + 1]] = True
        return stands

    def stages_at(self, c: Candidate, bounds: Sequence[int]) -> list[StageTable]:
        """Every stage's costs for one partition: numbers instead of tables."""
        stages = [StageTable(*(table[i, j] for table in self.stage(c, s))) for s, (i, j) in enumerate(pairwise(bounds))]
        if c.form.recompute == "none":
            return stages
        plain = self.stages_at(c._replace(recompute="none"), bounds)
        return [
            one._replace(recompute=one.backward - one.intra_backward - (other.backward - other.intra_backward))
            for one, other in zip(stages, plain, strict=True)
        ]

    def terms(self, c: Candidate, bounds: Sequence[int]) -> dict[str, float]:
        """The seconds of a step by term (see TERMS): those of the busiest stage, and the bubble of the fill.

        "messages" are the seconds of sending and receiving, and the transit that no computation hides; "correction" is
        what whole steps took longer than the other terms. "computing" has what kernels take below the peak, too.
        """
        stages = self.stages_at(c, bounds)
        fills, loads = zip(*(fill_and_load(c, s, stage) for s, stage in enumerate(stages)), strict=True)
        worker, load = busiest(c, [float(each) for each in loads])
        parts = dict.fromkeys(TERMS, 0.0)
        for s, stage in enumerate(stages):
            if c.worker_of(s) == worker:
                for name, seconds in stage_terms(c, stage).items():
                    parts[name] += float(seconds)
        total = load + (float(sum(fills)) if adds_fill(c) else 0.0)
        if c.planning.waits:
            terms = [wait_terms(c, s, stage) for s, stage in enumerate(stages)]
            total = max(load, wait_form(c).longest([tuple(map(float, each)) for each in terms]))
        parts["bubble"] = total - sum(parts.values())
        parts["correction"] = total * (self.correction(c) - 1)
        return {name: float(value) for name, value in parts.items()}


def stage_terms(c: Candidate, stage: StageTable) -> dict[str, Table]:
    """The seconds of a stage in a step by term; those in which it waits are left out, but for messages."""
    parts = {
        "computing again": c.microbatches * stage.recompute,
        "inside stages": c.microbatches * (stage.intra_forward + stage.intra_backward),
        "gathering weights": c.microbatches * (stage.forward_gather + stage.backward_gather),
        "all-reduce": stage.all_reduce,
        "update": stage.update,
        "runtime": c.microbatches * stage.action_overhead + stage.turn_overhead,
    }
    work = c.microbatches * (stage.forward + stage.backward) + stage.end
    computing = work - c.microbatches * stage.message_overhead - stage.loss_overhead
    exposed = microbatch_seconds(c, stage) - stage.forward - stage.backward
    messages = c.microbatches * (exposed + stage.message_overhead) + stage.loss_overhead
    return parts | {"computing": computing - sum(parts.values()), "messages": messages}


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


def busiest(c: Candidate, loads: Sequence[float]) -> tuple[int, float]:
    """The worker of the largest load, and that load: the mean of those of its stages."""
    means = [0.0] * c.pipeline
    for s, load in enumerate(loads):
        means[c.worker_of(s)] += load / c.planning.stages_per_worker
    worker = max(range(c.pipeline), key=lambda w: means[w])
    return worker, means[worker]


def borrowed(shared: tuple[int, ...], owner: int, *, trains: bool) -> Use:
    """The use of shared weights by all layers that have them but the one whose stage owns them."""
    return Use(shared, tuple(layer for layer in shared if layer != owner), trains)


class Head(NamedTuple):
    """The costs that a head adds to a stage."""

    times: Times
    static: Table
    gradients: Table
    held: Table
    graph: Table  # what it keeps beside its input


TERMS = (
    "computing", "below peak", "memory traffic", "launches", "computing again", "inside stages", "gathering weights",
    "all-reduce", "update", "runtime", "messages", "bubble", "correction",
)  # fmt: skip
AMOUNTS = (
    "activation",
    "shared",
    "input",
    "output",
    "loose_input",
    "loose_output",
    "recomputed",
)  # of a layer, in bytes
TENSORS_OF_SUM = 2  # that slabs sum at once: the weights and the bias of a layer
UPDATE, ACCUMULATE = 4, 5  # columns of `LayerTimes`
SLACK = 1 - 1e-9  # of lower bounds: sums in another order differ in the last bits


def adds_fill(c: Candidate) -> bool:
    """Whether a step includes the sum of fills; with several stages a worker, the load includes it."""
    return c.planned.drains and c.planning.stages_per_worker == 1


def microbatch_seconds(c: Candidate, stage: StageTable) -> Table:
    """Seconds of a micro-batch on a stage, with the transit that no computation hides."""
    work = stage.forward + stage.backward
    if c.planning.messages == "exposed":
        return work + 2 * stage.transit
    if c.planning.messages == "streamed":
        return np.maximum(stage.forward, stage.transit) + np.maximum(stage.backward, stage.transit)
    return np.maximum(work, stage.transit)


def wait_terms(c: Candidate, s: int, stage: StageTable) -> tuple[Table, Table, Table]:
    """A stage's `Row.beside_wait`, `awaited` and `transits`, under methods whose stages wait for the one above them."""
    work, in_flight = stage.forward + stage.backward, 2 * stage.transit
    if c.planning.waits == "hop":
        return stage.forward + in_flight + stage.deferrable + stage.end, work - stage.deferrable, 0.0 * work
    if c.planning.waits == "prediction":
        return work + stage.end, work + stage.learn, in_flight
    turn = np.maximum(work, stage.transit) if not c.receives_gradient(s) else work + in_flight
    return turn + stage.end, turn, 0.0 * work


def wait_form(c: Candidate) -> WaitForm:
    """How the stages of a candidate wait for the stages above them."""
    prediction = c.planned.method.prediction if c.planning.waits == "prediction" else None
    is_waiting = [c.receives_gradient(s) for s in range(c.stages)]
    return WaitForm(is_waiting, c.planning.waits != "hop", 0 if prediction is None else prediction.delay)


def fill_and_load(c: Candidate, s: int, stage: StageTable) -> tuple[Table, Table]:
    """The fill and the load of a stage, by the formulas at the top of this file."""
    turn, end, work = microbatch_seconds(c, stage), stage.end, stage.forward + stage.backward
    if c.planning.waits == "prediction":  # gradients that come later than a turn are in its wait
        return work, np.maximum(work + end, stage.transit)
    if c.planning.fills_bubble:
        bubble = 0.0 * work if not s else gap_seconds(c, stage) if c.microbatches >= c.stages else work
        return bubble + 2 * stage.transit, c.microbatches * turn + end
    if c.planning.order == "v":
        filling = (c.pipeline - 1) * (gap_seconds(c, stage) + 5 * stage.transit)
        return work, 2 * c.microbatches * turn + filling + 2 * end
    stages_per_worker = c.planning.stages_per_worker
    if c.planning.order == "breadth first":
        forwards = breadth_first_phase(c, stage.forward, stage.transit)
        backwards = breadth_first_phase(c, stage.backward, stage.transit)
        return work, forwards + backwards + stages_per_worker * end
    if stages_per_worker > 1:
        return work, (c.microbatches * stages_per_worker + c.pipeline - 1) * turn + stages_per_worker * end
    num_turns = c.microbatches - 1 if c.planned.drains else c.microbatches
    return work + 2 * stage.transit, num_turns * turn + end


def gap_seconds(c: Candidate, stage: StageTable) -> Table:
    """The seconds that each further worker adds to a step where W fills the bubble: `Planning.gap` of the method."""
    parts = (stage.forward, stage.backward - stage.deferrable, stage.deferrable)
    gap: Table = reduce(np.maximum, (weighted(factors, parts) for factors in c.planning.gap))
    return gap


def weighted(factors: Sequence[int], tables: Sequence[Table]) -> Table:
    """The sum of tables times factors."""
    pairs = zip(factors, tables, strict=True)
    products = [table if factor == 1 else factor * table for factor, table in pairs if factor]
    return reduce(np.add, products or [np.zeros_like(tables[0])])


def breadth_first_phase(c: Candidate, work: Table, transit: Table) -> Table:
    """Seconds of all forwards, or all backwards, of looped-bfs.

    A worker runs all micro-batches of one of its stages, then of the next. `work` is of one micro-batch.
    """
    pace, loops = np.maximum(work, transit), c.planning.stages_per_worker - 1
    loop = np.maximum(c.microbatches * pace, c.pipeline * (work + transit))
    seconds: Table = loops * loop + (c.microbatches - 1) * pace + c.pipeline * work + (c.pipeline - 1) * transit
    return seconds


def weight_gradients_of(weights: Numbers, backward: Numbers) -> Table:
    """W of [i, j): the weight gradient of its lowest layer that has one, and whole backwards of the layers above."""
    layers = len(weights)
    lowest = np.full(layers + 1, layers)
    for layer in reversed(range(layers)):
        lowest[layer] = layer if weights[layer] else lowest[layer + 1]
    sums = np.concatenate([[0.0], np.cumsum(backward)])
    begin = np.append(weights, 0.0)[lowest]
    above = sums[None, :] - sums[np.minimum(lowest + 1, layers)][:, None]
    columns = np.arange(layers + 1)
    table: Table = np.where(lowest[:, None] < columns[None, :], begin[:, None] + above, 0.0)
    return table
