"""The layers of a model measured on this machine, for plans: alone, and while all workers of the machine compute."""

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

from stretto.cost import Cluster
from stretto.cost.cluster import Device
from stretto.cost.cluster_file import to_dict
from stretto.cost.layer_table import Affine, LayerCost, Measured, ModelCosts, measured_of
from stretto.cost.stage_prediction import Machine, layer_seconds, update_seconds
from stretto.errors import UsageError
from stretto.measure import layer_costs, with_times
from stretto.measure.messages import agreed
from stretto.nn.batch import inputs_of
from stretto.nn.nested import map_tensors
from stretto.options.kinds import check_values
from stretto.plan.measurement_cache import MeasurementCache, Record, key_of
from stretto.runtime.launch import LaunchSettings
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import Costed, build
from stretto.study.prepare import optimizer

BLOCKS = 3  # in which layers are measured alone, and by all processes together; the middle one counts
SECONDS = 3.0  # of a measurement of all layers, about
REPEATS = (2, 5)
FOREVER = 1e9  # seconds
LARGEST = 1 << 30  # bytes of weights that are copied for a measurement


def is_measurable(model: Costed, cluster: Cluster) -> bool:
    """Whether `stretto plan` can measure the layers: the cluster is this machine, and their copies are small.

    Not on unequal workers: a launcher has made them so, and the processes that measure are none of its.
    """
    weights = sum(layer.parameter_bytes for layer in model.costs.layers)
    return is_here(cluster) and model.resolved is not None and weights <= LARGEST


def is_here(cluster: Cluster) -> bool:
    """Whether the cluster is this machine, as `stretto calibrate` has measured it, with equal workers."""
    here = cluster.name == platform.node() and len(cluster.groups) == 1 and cluster.groups[0].nodes == 1
    return here and not cluster.is_uneven


def with_measured_layers(
    model: Costed, cluster: Cluster, batch: int, tell: Callable[[int], object], *, file: Path | None, anew: bool = False
) -> Costed:
    """The costs with the seconds of each layer, of minibatches of `batch` examples and of parts of them.

    Starts as many processes as the cluster has workers, of one thread each, and keeps in `file` what they measure: for
    the same model, data and cluster it is not measured again, unless `anew`. Raises what one of the processes raises,
    and UsageError for a damaged file.
    """
    key = layers_key(model, cluster, batch)
    found = LAYERS.find(file, key, lambda: measure_layers(model, cluster, batch, tell), lambda _: not anew)
    if len(found["layers"]) != len(model.costs.layers):
        number = len(model.costs.layers)
        raise UsageError(
            f"{file} has {len(found['layers'])} of {number} layers: delete it, and they are measured again"
        )
    rows = tuple(
        replace(row, measured=measured_of(times))
        for row, times in zip(model.costs.layers, found["layers"], strict=True)
    )

    def part(counted: ModelCosts) -> ModelCosts:
        pairs = zip(counted.layers, rows, strict=True)
        layers = tuple(scale(row, whole, cluster.device(0), model, batch) for row, whole in pairs)
        return replace(counted, layers=layers, start=found["start"], step=found["step"])

    return replace(
        model,
        costs=replace(model.costs, layers=rows, start=found["start"], step=found["step"]),
        tensor_costs={parts: part(counted) for parts, counted in model.tensor_costs.items()},
        form_costs={form: part(counted) for form, counted in model.form_costs.items()},
    )


def measure_layers(model: Costed, cluster: Cluster, batch: int, tell: Callable[[int], object]) -> Record:
    """Start processes and measure `layers` on them."""
    from stretto.study.calibration_processes import measure_on_processes

    place = LaunchSettings(workers=min(cluster.num_workers, os.cpu_count() or 1))
    return measure_on_processes(layers, {"settings": model.resolved, "batch": batch}, place, tell)


def layers_key(model: Costed, cluster: Cluster, batch: int) -> str:
    """A key that differs if the model, its functions or data, the batch, or the calibration does."""
    assert model.resolved is not None, "the model can be trained"
    return key_of({"settings": model.resolved.to_json(), "batch": batch, "cluster": to_dict(cluster)})


def check(record: Mapping[str, Any]) -> None:
    """Raise UsageError, KeyError or TypeError for what `layers` does not give."""
    check_values("measured", record, {"layers": list[Measured], "start": float, "step": float})
    for index, times in enumerate(record["layers"]):
        lines = {key: line for key, line in vars(measured_of(times)).items() if isinstance(line, Affine)}
        for key, line in lines.items():
            never = max(line.each, line.at(1)) < 0  # for any number of examples
            if never or max(abs(line.fixed), abs(line.each)) > FOREVER:
                raise UsageError(f"layers[{index}].{key} = {times[key]}: seconds that can be measured belong here")
    _ = record["start"], record["step"]


LAYERS = MeasurementCache(
    ".layers.json", "layers", "layers that stretto plan measured", "layers are measured again", check
)


def scale(part: LayerCost, whole: LayerCost, device: Device, model: Costed, batch: int) -> LayerCost:
    """Scale the measured times of a whole layer to a process's part of it, by what the device's rates say of both."""
    times = whole.measured
    assert times is not None, "all layers have been measured"
    machine = Machine(device, model.costs.dtype)
    bare = replace(whole, measured=None)

    def line(kind: Any, measured: Affine | None) -> Affine | None:
        if measured is None:
            return None
        of_whole = layer_seconds(bare, kind, machine, batch)
        ratio = layer_seconds(part, kind, machine, batch) / of_whole if of_whole else 1.0
        return Affine(measured.fixed * ratio, measured.each * ratio)

    updates = update_seconds(bare, machine, model.optimizer)
    share = update_seconds(part, machine, model.optimizer) / updates if updates else 1.0
    return replace(
        part,
        measured=replace(
            times,
            forward=line("F", times.forward) or Affine(),
            backward=line("B", times.backward) or Affine(),
            input_gradient=line("I", times.input_gradient),
            weight_gradient=line("W", times.weight_gradient),
            update=None if times.update is None else times.update * share,
            accumulate=None if times.accumulate is None else times.accumulate * share,
        ),
    )


# -- in each process --------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """The times of all layers, and the seconds of starting a backward and a step of the optimizer."""

    layers: list[Measured]
    start: float
    step: float


def layers(tell: Callable[[], object], *, settings: TrainSettings, batch: int) -> dict[str, Any]:
    """Measure the layers among all processes; the same result on all: the first one alone, then all together."""
    resolved, loaded, model, cut = build(settings)
    every = list(model.layers if cut is None else cut)
    examples, targets = [], []
    for size in sizes_of(batch):
        x, y = loaded.train.first(size)
        x, y = repeated(x, size), repeated(y, size)
        examples.append(inputs_of(x))
        targets.append(y)
    costs = layer_costs(every, examples[-1], loss=model.loss, target=targets[-1])

    def timed(repeats: int) -> Sample:
        found = with_times(
            costs, every, examples, loss=model.loss, targets=targets, optimizer=optimizer(resolved), repeats=repeats
        )
        return Sample([row.measured for row in found.layers if row.measured is not None], found.start, found.step)

    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup), "the caller has started several processes"
    begin = time.perf_counter()
    timed(1)
    repeats = max(REPEATS[0], min(REPEATS[1], int(agreed(world, SECONDS / (time.perf_counter() - begin)))))
    tell()
    alone, together = [], []
    for _ in range(BLOCKS):
        dist.barrier()
        alone += [timed(repeats)] if dist.get_rank() == 0 else []
        dist.barrier()
        together.append(timed(repeats))
        tell()
    slowed = [
        agreed(world, median(passes(times, batch) for times in of_layer))
        for of_layer in zip(*(sample.layers for sample in together), strict=True)
    ]
    result: list[dict[str, Any]] = [{}]
    if dist.get_rank() == 0:
        middle = sorted(alone, key=lambda sample: sum(passes(times, batch) for times in sample.layers))[BLOCKS // 2]
        lines = [
            replace(times, contention=max(1.0, seconds / max(1e-9, passes(times, batch))))
            for times, seconds in zip(middle.layers, slowed, strict=True)
        ]
        result = [{"layers": list(map(asdict, lines)), "start": middle.start, "step": middle.step}]
    dist.broadcast_object_list(result)
    return result[0]


def sizes_of(batch: int) -> list[int]:
    """The numbers of examples that are measured: a minibatch, a half, and an eighth of it."""
    return sorted({batch, max(1, batch // 2), max(1, batch // 8)} | ({2} if batch == 1 else set()), reverse=True)


def repeated(value: Any, size: int) -> Any:
    """Repeat a batch until it has `size` examples."""
    return map_tensors(lambda each: each.repeat(-(-size // len(each)), *[1] * (each.dim() - 1))[:size], value)


def passes(times: Measured, batch: int) -> float:
    """Seconds of a forward and a backward."""
    return times.forward.at(batch) + times.backward.at(batch)
