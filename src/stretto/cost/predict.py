"""How long a stage's actions take on a cluster, and what they keep in memory: from costs alone. No torch here.

Measured times of layers come first, then the device's rates for sorts of operators, then the roofline.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from stretto.cost.cluster import Cluster, Device
from stretto.cost.layer_table import Affine, Kind, LayerCost, ModelCosts, Work
from stretto.errors import UsageError, nearest
from stretto.options.checks import of_kind, positive, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stretto.schedule import Action
    from stretto.simulate import Durations

Seconds = TypeVar("Seconds", float, "NDArray[np.float64]")  # of one stage, or a table of them


class Optimizer(NamedTuple):
    """Whose rate it has, how many numbers it keeps for a parameter, and how often a step reads or writes one."""

    family: str
    states: int
    accesses: int


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer("sgd", 1, 5),  # with momentum: reads weight, gradient, velocity, writes weight and velocity
    "lars": Optimizer("sgd", 1, 5),
    "adam": Optimizer("adam", 2, 7),
    "adamw": Optimizer("adam", 2, 7),
    "nadam": Optimizer("adam", 2, 7),
    "lamb": Optimizer("adam", 2, 7),
}


def optimizer_of(name: str) -> Optimizer:
    """What is known of an optimizer. Raises UsageError if nothing is."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {shown(name)}: {nearest(str(name), OPTIMIZERS)}")
    return OPTIMIZERS[name]


class Machine(NamedTuple):
    """A device at a dtype; `crowded` where others on its node compute at the same time."""

    device: Device
    dtype: str
    crowded: bool = False


def work_seconds(work: Work, direction: str, machine: Machine, examples: float) -> float:
    """The time of operators of one sort, in a "forward" or a "backward"."""
    device = machine.device
    flops, num_bytes = work.flops.at(examples), work.bytes.at(examples)
    rate = device.rates.get(work.operator, {}).get(direction)
    if rate is None:
        compute = flops / device.peak_of(machine.dtype) if flops else 0.0
        return max(compute, num_bytes / device.memory_bandwidth)
    return rate.seconds(work.calls, flops, num_bytes) * (rate.contention if machine.crowded else 1)


def layer_seconds(layer: LayerCost, kind: Kind, machine: Machine, examples: float) -> float:
    """The time of an action of a kind on one layer, for a micro-batch of so many examples."""
    direction = "forward" if kind == "F" else "backward"

    def predicted(crowded: bool) -> float:
        where = machine._replace(crowded=crowded)
        return sum(work_seconds(work, direction, where, examples) for work in layer.works(kind))

    line = measured_line(layer, kind)
    if line is None or layer.measured is None:
        return predicted(machine.crowded)
    disturbed = machine.crowded and not layer.measured.crowded and layer.works(kind)
    return line.at(examples) * (predicted(True) / predicted(False) if disturbed else 1)


def measured_line(layer: LayerCost, kind: Kind) -> Affine | None:
    """The measured time of a kind of action, if there is one."""
    m = layer.measured
    if m is None:
        return None
    return {"F": m.forward, "B": m.backward, "I": m.input_gradient, "W": m.weight_gradient}[kind]


def update_seconds(layer: LayerCost, machine: Machine, optimizer: str) -> float:
    """The time of a step of the optimizer on a layer's parameters."""
    if layer.measured is not None and layer.measured.update is not None:
        return layer.measured.update
    chosen, device = optimizer_of(optimizer), machine.device
    moved = chosen.accesses * layer.gradient_bytes
    rate = device.rates.get(chosen.family, {}).get("update")
    if rate is None:
        return moved / device.memory_bandwidth
    return rate.seconds(layer.parameter_tensors, 0, moved) * (rate.contention if machine.crowded else 1)


def accumulate_seconds(layer: LayerCost, machine: Machine) -> float:
    """The time of adding a micro-batch's gradients to those before it."""
    if layer.measured is not None and layer.measured.accumulate is not None:
        return layer.measured.accumulate
    work = Work("elementwise", layer.parameter_tensors, Affine(), Affine(3 * layer.gradient_bytes))
    return work_seconds(work, "forward", machine, 0)


class LayerTimes(NamedTuple, Generic[Seconds]):
    """Seconds of a layer's actions on a micro-batch; sums over layers are those of a stage but for W, see `summed`.

    `accumulate` is what a backward takes longer where gradients of another micro-batch are there already.
    """

    forward: Seconds
    backward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    update: Seconds
    accumulate: Seconds


def layer_times(
    costs: ModelCosts, machine: Machine, examples: float, *, optimizer: str = "sgd"
) -> list[LayerTimes[float]]:
    """Times of each layer for micro-batches of so many examples."""
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    return [
        LayerTimes._make(
            (
                *(layer_seconds(layer, kind, machine, examples) for kind in kinds),
                update_seconds(layer, machine, optimizer),
                accumulate_seconds(layer, machine),
            )
        )
        for layer in costs.layers
    ]


def summed(layers: Sequence[LayerTimes[float]]) -> LayerTimes[float]:
    """A stage of several layers: W is a whole backward above the lowest layer that has a weight gradient."""
    total = LayerTimes(*(sum(column) for column in zip(*layers, strict=True)))
    lowest = next((index for index, each in enumerate(layers) if each.weight_gradient), None)
    if lowest is None:
        return total
    weights = layers[lowest].weight_gradient + sum(each.backward for each in layers[lowest + 1 :])
    return total._replace(weight_gradient=weights)


def started(times: LayerTimes[float], start: float, step: float = 0.0) -> LayerTimes[float]:
    """With what every backward takes once, if it has anything to do, and every step of the optimizer."""
    once = {"backward": start, "input_gradient": start, "weight_gradient": start, "update": step}
    return times._replace(**{kind: getattr(times, kind) + more for kind, more in once.items() if getattr(times, kind)})


def with_head(stage: LayerTimes[Seconds], head: LayerTimes[Seconds]) -> LayerTimes[Seconds]:
    """A stage with a head behind it, which the first sweep of its backward goes through."""
    return LayerTimes(
        forward=stage.forward + head.forward,
        backward=stage.backward + head.backward,
        input_gradient=stage.input_gradient + head.backward,
        weight_gradient=stage.weight_gradient,
        update=stage.update + head.update,
        accumulate=stage.accumulate + head.accumulate,
    )


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a stage's actions on a micro-batch, and bytes.

    `send` takes the output to the next stage,
    `send_back` the gradient of the input to the stage before; 0 where there is none, or on the same worker.
    `all_reduce` is what replicas take to sum their gradients. `input` and `output` bytes travel; `held` bytes are kept
    of each micro-batch between its forward and its backward; `parameters`, `gradients` and the optimizer's `state`
    always.
    """

    compute: LayerTimes[float]
    all_reduce: float
    send: float
    send_back: float
    input: float
    output: float
    held: float
    parameters: float
    gradients: float
    state: float

    def seconds(self, kind: str) -> float:
        """The time of a kind of action; a recompute is a forward."""
        forward, backward, inputs, weights, update, _ = self.compute
        times = {"F": forward, "C": forward, "B": backward, "I": inputs, "W": weights, "U": update}
        return {**times, "A": self.all_reduce}.get(kind, 0.0)


def stage_times(
    costs: ModelCosts,
    bounds: Sequence[int],
    cluster: Cluster,
    examples: float,
    *,
    workers: Sequence[Sequence[int]] | None = None,
    dtype: str | None = None,
    optimizer: str = "sgd",
    heads: Sequence[LayerCost | None] | None = None,
    silent: Collection[int] = (0,),
) -> tuple[StageTimes, ...]:
    """Times of each stage for micro-batches of so many examples.

    Stage s holds the layers from bounds[s] up to bounds[s + 1]. `workers` says for each stage which workers hold its
    replicas, among which the examples are divided; worker s alone unless said otherwise. The slowest replica counts.
    `dtype` is that of the parameters unless said otherwise. `heads` are rows of what stands behind stages with losses
    of their own, loss included; None for others and for the last. `silent` stages tell nobody a gradient of their
    inputs, and compute none. Raises UsageError for what does not fit the cluster.
    """
    of_kind("costs", costs, ModelCosts, "what stretto.cost.layer_costs(...) returned")
    of_kind("cluster", cluster, Cluster, "what stretto.cost.find_cluster(name) returned")
    positive("examples", examples)
    optimizer_of(optimizer)
    stages = costs.stages(bounds)
    places = [[s] for s in range(len(stages))] if workers is None else [list(each) for each in workers]
    if len(places) != len(stages) or not all(places) or len({len(each) for each in places}) > 1:
        raise UsageError(
            f"workers={places} for {len(stages)} stages: give for each stage its workers, as many as for any other"
        )
    share = examples / len(places[0])
    speeds = speeds_of(costs, cluster, places, share, dtype or costs.dtype, optimizer)
    behind = heads or [None] * len(stages)
    heads_costs = ModelCosts(tuple(head for head in behind if head is not None), costs.dtype)
    head_speeds = speeds_of(heads_costs, cluster, places, share, dtype or costs.dtype, optimizer)
    found = []
    for s, (stage, here) in enumerate(zip(stages, places, strict=True)):
        each = [summed(speeds[worker][bounds[s] : bounds[s + 1]]) for worker in here]
        replicas = [started(times, costs.start, costs.step) for times in each]
        compute = LayerTimes(*(max(column) for column in zip(*replicas, strict=True)))
        if s in silent:
            compute = compute._replace(backward=compute.weight_gradient, input_gradient=0.0)
        head = behind[s]
        if head is not None:
            number = sum(each is not None for each in behind[:s])
            columns = zip(*(head_speeds[worker][number] for worker in here), strict=True)
            compute = with_head(compute, LayerTimes(*map(max, columns)))
            stage = replace(stage.then(head), output=stage.output)
        found.append(
            StageTimes(
                compute=compute,
                all_reduce=all_reduce_seconds(cluster, here, stage.gradient_bytes),
                send=message_seconds(cluster, here, places[s + 1], stage.output.at(share))
                if s + 1 < len(stages) else 0.0,
                send_back=message_seconds(cluster, here, places[s - 1], stage.input.at(share)) if s else 0.0,
                input=stage.input.at(share),
                output=stage.output.at(share),
                held=stage.held.at(share),
                parameters=stage.parameter_bytes,
                gradients=stage.gradient_bytes,
                state=optimizer_of(optimizer).states * stage.gradient_bytes,
            )
        )  # fmt: skip
    return tuple(found)


def speeds_of(
    costs: ModelCosts, cluster: Cluster, places: Sequence[Sequence[int]], share: float, dtype: str, optimizer: str
) -> dict[int, list[LayerTimes[float]]]:
    """The times of all layers on each worker; workers that are alike share them."""
    busy = sorted({worker for each in places for worker in each})
    known: dict[tuple[str, bool], list[LayerTimes[float]]] = {}
    speeds = {}
    for worker, crowded in zip(busy, cluster.crowded(busy), strict=True):
        key = (cluster.groups[cluster.place(worker).group].device, crowded)
        if key not in known:
            known[key] = layer_times(costs, Machine(cluster.device(worker), dtype, crowded), share, optimizer=optimizer)
        speeds[worker] = known[key]
    return speeds


def message_seconds(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int], num_bytes: float) -> float:
    """A message from each worker to its peer while both ends compute: the slowest; 0 where none changes workers."""
    links = [cluster.link(a, b) for a, b in zip(senders, receivers, strict=True) if a != b]
    return max((link.busy_seconds(num_bytes) for link in links), default=0.0)


def all_reduce_seconds(cluster: Cluster, workers: Sequence[int], num_bytes: float, *, algorithm: str = "ring") -> float:
    """An all-reduce among workers by its closed form, on the slowest of the links between them."""
    from stretto.collectives import formulas

    link = cluster.slowest_link(workers, num_bytes / len(workers))
    if link is None:
        return 0.0
    gamma = max(cluster.device(worker).reduction_seconds_per_byte for worker in workers)
    speeds = formulas.Link(
        latency=link.latency, seconds_per_byte=link.seconds_per_byte, reduction_seconds_per_byte=gamma
    )
    return speeds.seconds(formulas.formula(algorithm, len(workers), num_bytes))


def durations_of(times: Sequence[StageTimes], *, accumulate: bool = True) -> "Durations":
    """The times of actions for `simulate`; with `accumulate` every backward finds gradients to add its own to."""
    extra = {"B": 1.0, "W": 1.0} if accumulate else {}

    def duration(action: "Action") -> float:
        stage = times[action.stage]
        return stage.seconds(action.kind) + extra.get(action.kind, 0.0) * stage.compute.accumulate

    return duration
