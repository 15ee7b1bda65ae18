"""Predict the seconds of a stage's actions on a cluster. No torch here.

A layer's measured time is used if there is one, else the device's rate for each sort of operator, else what the device
attains kernel by kernel (`attained.py`), else the roofline.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stretto.cost.attained import BYTES, TENSOR_CORES, DevicePeaks, KernelSeconds, dtype_of_products, kernel_seconds
from stretto.cost.cluster import Cluster, Device, WorkerKind
from stretto.cost.communication import gradient_sum
from stretto.cost.cure_costs import (
    BFLOAT16,
    FEEDBACK_PASSES,
    PLAIN,
    PRODUCTS,
    basis_refresh,
    basis_step,
    newton_schulz,
    rotation_works,
    wide_dtype,
)
from stretto.cost.layer_sums import LayerParts, LayerTimes, learn_seconds, stage_of, with_head
from stretto.cost.layer_table import Affine, Kind, LayerCost, Measured, ModelCosts, Work, Works
from stretto.errors import UsageError
from stretto.methods.cure import GradientPrediction, StepCure
from stretto.optimizers import REFRESH_EVERY, Optimizer, Stepping, optimizer_of, stepping_of
from stretto.options.checks import of_kind, positive


class Machine(NamedTuple):
    """A device at a dtype; `crowded` if other workers of its node compute at the same time."""

    device: Device
    dtype: str
    crowded: bool = False


def pass_seconds(works: Works, direction: str, machine: Machine, examples: float) -> float:
    """Seconds of a pass: those of the device, or of the host that starts its kernels where that takes longer."""
    return max(pass_parts(works, direction, machine, examples))


def pass_parts(works: Works, direction: str, machine: Machine, examples: float) -> KernelSeconds:
    """Seconds of a pass on the device, and of its host."""
    seconds = [device_and_host(work, direction, machine, examples) for work in works]
    return KernelSeconds(sum(device for device, _ in seconds), sum(host for _, host in seconds))


def device_and_host(work: Work, direction: str, machine: Machine, examples: float) -> KernelSeconds:
    """Seconds of the operators of one sort on the device, and of the host that starts them, where that is known."""
    device = machine.device
    flops, num_bytes = work.flops.at(examples), work.bytes.at(examples)
    rate = device.rates.get(work.operator, {}).get(direction)
    if rate is not None:
        seconds = rate.seconds(work.calls, flops, num_bytes) * (rate.contention if machine.crowded else 1)
        return KernelSeconds(seconds, 0.0)
    dtype = dtype_of_products(machine.dtype)
    peak = device.peak_of(dtype) if flops else math.inf
    if device.attained is None:
        return KernelSeconds(max(flops / peak, num_bytes / device.memory_bandwidth), 0.0)
    peaks = DevicePeaks(peak, device.memory_bandwidth, BYTES.get(dtype, 4), dtype in TENSOR_CORES)
    return kernel_seconds(work, device.attained.in_dtype(dtype), peaks, examples)


def layer_seconds(layer: LayerCost, kind: Kind, machine: Machine, examples: float) -> float:
    """Seconds of an action of a kind on one layer alone, for a micro-batch of `examples`."""
    return max(layer_parts(layer, kind, machine, examples))


def layer_parts(layer: LayerCost, kind: Kind, machine: Machine, examples: float) -> KernelSeconds:
    """Seconds of an action of a kind on one layer, of the device and of its host; measured ones have both."""
    direction = "forward" if kind == "F" else "backward"
    line = measured_line(layer, kind)
    if line is None or layer.measured is None:
        seconds = pass_parts(layer.works(kind), direction, machine, examples)
        kept = layer.parameter_tensors if kind in "BW" and layer.works(kind) else 0
        return seconds._replace(host=seconds.host + host_seconds(machine, "per_gradient") * kept)
    if layer.measured.contention is not None:
        return KernelSeconds(line.at(examples) * slowdown(layer.measured, machine) / machine.device.speed, 0.0)

    def predicted(crowded: bool) -> float:
        return pass_seconds(layer.works(kind), direction, machine._replace(crowded=crowded), examples)

    slowed = machine.crowded and not layer.measured.crowded and layer.works(kind)
    longer = predicted(True) / predicted(False) if slowed else 1
    return KernelSeconds(line.at(examples) * longer / machine.device.speed, 0.0)


def host_seconds(machine: Machine, key: str) -> float:
    """A figure of the host that `Attained` has by this name; 0 where the device says nothing."""
    seconds: float = 0.0 if machine.device.attained is None else getattr(machine.device.attained, key)
    return seconds


def slowdown(measured: Measured, machine: Machine) -> float:
    """How many times as long measured work takes on a machine; 1 where its contention is not known."""
    return measured.contention or 1.0 if machine.crowded else 1.0


def measured_line(layer: LayerCost, kind: Kind) -> Affine | None:
    """The measured seconds of a kind of action; None if it was not measured."""
    measured = layer.measured
    if measured is None:
        return None
    lines = {"F": measured.forward, "B": measured.backward, "I": measured.input_gradient, "W": measured.weight_gradient}
    return lines[kind]


def update_seconds(layer: LayerCost, machine: Machine, optimizer: str | Stepping) -> float:
    """Seconds of an optimizer step on a layer's parameters, where the layer is alone."""
    return max(update_parts(layer, machine, optimizer))


def update_parts(layer: LayerCost, machine: Machine, optimizer: str | Stepping) -> KernelSeconds:
    """Seconds of an optimizer step on a layer's parameters, the mean over refreshes of SOAP's bases; and of the host.

    Measured steps are medians, which are of steps without a refresh: it is added.
    """
    stepping, device = stepping_of(optimizer), machine.device
    chosen = optimizer_of(stepping.name)
    if layer.measured is not None and layer.measured.update is not None:
        measured = stepping.longer * layer.measured.update * slowdown(layer.measured, machine) / device.speed
        return KernelSeconds(measured + refresh_seconds(layer, chosen, machine), 0.0)
    moved, products = chosen.accesses * layer.gradient_bytes, matrix_seconds(layer, chosen, machine)
    rate = device.rates.get(chosen.family, {}).get("update")
    if rate is None:
        work = Work(chosen.family, layer.parameter_tensors, Affine(), Affine(moved))
        seconds = stepping.longer * pass_parts((work,), "update", machine, 0).device
        return KernelSeconds(seconds + products, host_seconds(machine, "update_of_tensor") * layer.parameter_tensors)
    passes = rate.seconds(layer.parameter_tensors, 0, moved) * (rate.contention if machine.crowded else 1)
    return KernelSeconds(stepping.longer * passes + products, 0.0)


def matrix_seconds(layer: LayerCost, optimizer: Optimizer, machine: Machine) -> float:
    """Seconds of the matrix products of an optimizer's step.

    By rates of such products, of linear layers, or the roofline. Muon's are of bfloat16; where a device has no peak for
    it, of the machine's dtype.
    """
    if optimizer.on_matrices == "orthogonalise":
        low = machine._replace(dtype="bfloat16") if "bfloat16" in machine.device.peak else machine
        return pass_seconds(newton_schulz(layer.matrices, sort_of(BFLOAT16, machine)), "forward", low, 0)
    if optimizer.on_matrices != "rotate":
        return 0.0
    wide = in_wide(machine)
    products = basis_step(layer.matrices.bases, item_of(wide), sort_of(PRODUCTS, wide))
    return pass_seconds(products, "forward", wide, 0) + refresh_seconds(layer, optimizer, machine)


def refresh_seconds(layer: LayerCost, optimizer: Optimizer, machine: Machine) -> float:
    """A step's share of the seconds of SOAP's new bases."""
    if optimizer.on_matrices != "rotate":
        return 0.0
    wide = in_wide(machine)
    works = basis_refresh(layer.matrices.bases, item_of(wide), sort_of(PRODUCTS, wide), turns_second_moments=False)
    return pass_seconds(works, "forward", wide, 0) / REFRESH_EVERY


def sort_of(products: str, machine: Machine) -> str:
    """The sort of operator that products of matrices are priced as: their own where a machine has its rates."""
    return products if products in machine.device.rates else "linear"


def in_wide(machine: Machine) -> Machine:
    """The machine in the dtype in which bases are made."""
    return machine._replace(dtype=wide_dtype(machine.dtype))


def item_of(machine: Machine) -> int:
    """Bytes of a number."""
    return BYTES.get(machine.dtype, 4)


class CureSeconds(NamedTuple):
    """Seconds that a cure adds to every step, and to one that refreshes the bases."""

    step: float
    refresh: float

    def mean(self, cure: StepCure) -> float:
        """Seconds of a step in the long run."""
        return self.step + (0.0 if cure.interval is None else self.refresh / cure.interval)


def cure_seconds(cure: StepCure, layer: LayerCost, machine: Machine, stepping: Stepping) -> CureSeconds:
    """Seconds that a cure adds to the optimizer's step on a layer."""
    step, refresh = FEEDBACK_PASSES * stepping.copies * accumulate_seconds(layer, machine) * bool(cure.feedback), 0.0
    if cure.interval is not None:
        each, again = rotation_works(cure, layer, stepping, sort_of(PRODUCTS, machine))
        step += pass_seconds(each, "forward", in_wide(machine), 0)
        refresh = pass_seconds(again, "forward", in_wide(machine), 0)
    return CureSeconds(step, refresh)


def accumulate_seconds(layer: LayerCost, machine: Machine) -> float:
    """Seconds of the device to add a micro-batch's gradients to those of earlier micro-batches."""
    if layer.measured is not None and layer.measured.accumulate is not None:
        return layer.measured.accumulate * slowdown(layer.measured, machine) / machine.device.speed
    work = Work("elementwise", layer.parameter_tensors, Affine(), Affine(3 * layer.gradient_bytes))
    return pass_parts((work,), "forward", machine, 0).device


def times_by_part(
    costs: ModelCosts, machine: Machine, examples: float, *, optimizer: str | Stepping = "sgd"
) -> list[LayerParts]:
    """The seconds of each layer's actions on the device and on its host, for micro-batches of `examples`."""
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    known: dict[tuple[object, ...], LayerParts] = {}  # by what layers have in common: they share objects
    times = []
    for layer in costs.layers:
        works = tuple(id(layer.works(kind)) for kind in kinds)
        key = (works, id(layer.measured), layer.parameter_tensors, layer.gradient_bytes, layer.matrices)
        if key not in known:
            actions = [layer_parts(layer, kind, machine, examples) for kind in kinds]
            actions += [update_parts(layer, machine, optimizer), KernelSeconds(accumulate_seconds(layer, machine), 0.0)]
            known[key] = LayerParts(*(LayerTimes(*seconds) for seconds in zip(*actions, strict=True)))
        times.append(known[key])
    return times


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a stage's actions on a micro-batch, and bytes of what it sends and copies.

    `all_reduce` are those of the replicas' all-reduce of gradients, `learn` those of learning to predict a gradient.
    `input` and `output` are the bytes of messages, `gradients` those of its weights' gradients.
    """

    compute: LayerTimes[float]
    input: float
    output: float
    gradients: float
    all_reduce: float = 0.0
    learn: float = 0.0

    def seconds(self, kind: str) -> float:
        """Seconds of a kind of action; a recompute takes as long as a forward."""
        forward, backward, inputs, weights, update, _ = self.compute
        times = {"F": forward, "C": forward, "B": backward, "I": inputs, "W": weights, "U": update}
        return {**times, "A": self.all_reduce, "L": self.learn}.get(kind, 0.0)


def stage_times(
    costs: ModelCosts,
    bounds: Sequence[int],
    cluster: Cluster,
    examples: float,
    *,
    workers: Sequence[Sequence[int]] | None = None,
    optimizer: str | Stepping = "sgd",
    heads: Sequence[LayerCost | None] | None = None,
    silent: Collection[int] = (0,),
    cures: Sequence[StepCure] | None = None,
    predictions: Mapping[int, GradientPrediction] | None = None,
) -> tuple[StageTimes, ...]:
    """The seconds of each stage, and the bytes of its messages, for micro-batches of `examples`.

    Stage s holds the layers from bounds[s] up to bounds[s + 1]. `workers` lists for each stage the workers that hold
    its replicas, among which the examples are divided; worker s by default. The slowest replica counts. `heads` has for
    each stage the row of the head behind it, loss included, or of what predicts its gradient, where `predictions` says
    how that learns; None for stages without one, and for the last. `silent` stages compute and send no gradient of
    their inputs. `cures` are what a method changes in the stages' steps (`Method.step_cures`).

    Raises UsageError for bounds or workers that do not fit, and for an unknown optimizer or dtype.
    """
    of_kind("costs", costs, ModelCosts, "what stretto.cost.layer_costs(...) returned")
    of_kind("cluster", cluster, Cluster, "what stretto.cost.find_cluster(name) returned")
    positive("examples", examples)
    stepping, stages = stepping_of(optimizer), costs.stages(bounds)
    places = workers_of_stages(workers, len(stages))
    share = examples / len(places[0])
    machines = machines_of(cluster, places, costs.dtype)
    speeds_of_layers = LayerSpeeds(
        *(speeds_of(costs, machines, share, stepping, on_chip=near) for near in (False, True))
    )
    predicted = []
    for s, (stage, replicas) in enumerate(zip(stages, places, strict=True)):
        span, head, learn = (bounds[s], bounds[s + 1]), None if heads is None else heads[s], 0.0
        held = stage.parameter_bytes + stage.held.at(share)
        compute = slowest_replica(costs, span, cluster, replicas, held, speeds_of_layers)
        if s in silent:
            compute = compute._replace(backward=compute.weight_gradient, input_gradient=0.0)
        rows, gradients, tensors = costs.layers[slice(*span)], stage.gradient_bytes, stage.parameter_tensors
        if head is not None:
            here = {worker: machines[worker] for worker in replicas}
            speeds = speeds_of(ModelCosts((head,), costs.dtype), here, share, stepping)
            of_head = LayerTimes(*map(max, zip(*(layers[0].alone for layers in speeds.values()), strict=True)))
            if predictions and s in predictions:
                compute = compute._replace(backward=compute.backward + of_head.forward)
                learn = learn_seconds(of_head, keeps_graph=predictions[s].keeps_graph)
            else:
                compute, rows = with_head(compute, of_head), (*rows, head)
                gradients, tensors = gradients + head.gradient_bytes, tensors + head.parameter_tensors
        if cures is not None and cures[s] != PLAIN:
            compute = with_cure(compute, rows, cures[s], [machines[worker] for worker in replicas], stepping)
        predicted.append(
            StageTimes(
                compute=compute,
                input=stage.input.at(share),
                output=stage.output.at(share),
                gradients=gradients,
                all_reduce=gradient_seconds(cluster, replicas, gradients, tensors),
                learn=learn,
            )
        )
    return tuple(predicted)


def workers_of_stages(workers: Sequence[Sequence[int]] | None, stages: int) -> list[list[int]]:
    """The workers that hold each stage's replicas. Raises UsageError if they do not fit so many stages."""
    places = [[s] for s in range(stages)] if workers is None else [list(replicas) for replicas in workers]
    if len(places) != stages or not all(places) or len({len(replicas) for replicas in places}) > 1:
        raise UsageError(
            f"workers={places} for {stages} stages: give the workers of each stage, the same number for all stages"
        )
    return places


def with_cure(
    times: LayerTimes[float], rows: Sequence[LayerCost], cure: StepCure, machines: Sequence[Machine], stepping: Stepping
) -> LayerTimes[float]:
    """Times whose update has what a cure adds to it on each layer, on the slowest of the machines."""
    apart = {id(machine): machine for machine in machines}  # machines of a kind are one object
    longest = max(
        sum(cure_seconds(cure, row, machine, stepping).mean(cure) for row in rows) for machine in apart.values()
    )
    return times._replace(update=times.update + longest)


class LayerSpeeds(NamedTuple):
    """The seconds of all layers on each worker, and those of layers in stages that stay on its chip."""

    anywhere: dict[int, list[LayerParts]]
    on_chip: dict[int, list[LayerParts]]


def slowest_replica(
    costs: ModelCosts,
    ends: tuple[int, int],
    cluster: Cluster,
    replicas: Sequence[int],
    kept: float,
    layer_speeds: LayerSpeeds,
) -> LayerTimes[float]:
    """The seconds of a stage that keeps so many bytes, on the slowest of the workers that hold its replicas."""
    times = []
    for worker in replicas:
        device = cluster.device(worker)
        speeds = layer_speeds.on_chip if device.keeps_on_chip(kept) else layer_speeds.anywhere
        layers = speeds[worker][ends[0] : ends[1]]
        is_whole = len(layers) == len(costs.layers)
        times.append(
            stage_of(layers, is_whole=is_whole, start=costs.start / device.speed, step=costs.step / device.speed)
        )
    return LayerTimes(*(max(column) for column in zip(*times, strict=True)))


def speeds_of(
    costs: ModelCosts, machines: Mapping[int, Machine], share: float, stepping: Stepping, *, on_chip: bool = False
) -> dict[int, list[LayerParts]]:
    """The seconds of all layers on each worker, for `share` examples; equal workers share one list."""
    if on_chip and all(machine.device.on_chip_memory is None for machine in machines.values()):
        return {}
    known: dict[int, list[LayerParts]] = {}
    for machine in machines.values():
        if id(machine) not in known:
            chosen = machine._replace(device=machine.device.on_chip) if on_chip else machine
            known[id(machine)] = times_by_part(costs, chosen, share, optimizer=stepping)
    return {worker: known[id(machine)] for worker, machine in machines.items()}


def machines_of(cluster: Cluster, places: Sequence[Sequence[int]], dtype: str) -> dict[int, Machine]:
    """The machine of each worker that holds a stage; equal ones are one object."""
    busy = sorted({worker for replicas in places for worker in replicas})
    known: dict[tuple[WorkerKind, bool], Machine] = {}
    for worker, crowded in zip(busy, cluster.crowded(busy), strict=True):
        known.setdefault((cluster.kinds[worker], crowded), Machine(cluster.device(worker), dtype, crowded))
    kinds = zip(busy, cluster.crowded(busy), strict=True)
    return {worker: known[cluster.kinds[worker], crowded] for worker, crowded in kinds}


def gradient_seconds(cluster: Cluster, workers: Sequence[int], num_bytes: float, tensors: int) -> float:
    """Seconds in which replicas on these workers sum their gradients, those of so many tensors, on the slowest link."""
    links = cluster.collective_links(workers)
    gamma = max(cluster.device(worker).reduction_seconds_per_byte for worker in workers)
    return float(gradient_sum(links, len(workers), np.array(num_bytes), np.array(tensors), gamma))
