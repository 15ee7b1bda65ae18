"""Whether the commands of rows can be asked for, by their options alone: nothing is counted, priced or predicted."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from predict import parsed
from rows import Row

from stretto.cli.planning import format_of
from stretto.cost import Cluster
from stretto.cost.attained import dtype_of_products
from stretto.cost.cluster_file import find_cluster
from stretto.models.published import family_member
from stretto.plan.planned_methods import names_of
from stretto.plan.problem import RECOMPUTE, SHARDS
from stretto.settings.planning import SEQUENCE, PlanSettings


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is wrong with the rows' commands, one sentence each."""
    return [f"{row.name}: {complaint}" for row in rows for complaint in complaints_of(row)]


def complaints_of(row: Row) -> Iterator[str]:
    """What is wrong with a row's command: options that are unknown, or do not fit together."""
    try:
        settings: PlanSettings = parsed(row.arguments()).arguments["settings"]
        cluster = find_cluster(str(settings.cluster))
        family_member(settings.model, settings.model_options or {})
        names_of(settings.methods)
        settings = replace(settings, dtype=format_of(settings, cluster).dtype)
    except Exception as error:  # noqa: BLE001 - whatever the command line refuses
        yield f"{type(error).__name__}: {error}"
        return
    yield from unknown(settings, cluster)
    yield from misfits(settings, cluster)


def unknown(settings: PlanSettings, cluster: Cluster) -> Iterator[str]:
    """Values of options that there are not."""
    peaks = {dtype for device in cluster.devices.values() for dtype in device.peak}
    for option, values, known in (
        ("recompute", settings.recompute or (), RECOMPUTE), ("sharding", settings.sharding or (), SHARDS),
        ("sequence-parallel", (settings.sequence_parallel,), SEQUENCE),
        ("dtype", (dtype_of_products(str(settings.dtype)),), peaks),
    ):  # fmt: skip
        for value in values:
            if value not in known:
                yield f"{option} = {value!r}; there are {', '.join(known)}"


def misfits(settings: PlanSettings, cluster: Cluster) -> Iterator[str]:
    """Numbers of workers, examples and stages that do not fit together, where a row gives one of each."""
    axes = settings.data_parallel, settings.tensor, settings.pipeline
    if settings.workers is None or not all(axes) or not settings.batch_size:
        yield "it does not give workers, batch-size, data-parallel, tensor and pipeline"
        return
    data, tensor, pipeline = (values[0] for values in axes if values)
    if settings.workers > cluster.num_workers:
        yield f"{settings.workers} workers; the cluster has {cluster.num_workers}"
    if math.prod((data, tensor, pipeline)) != settings.workers:
        yield f"{data} x {tensor} x {pipeline} replicas, tensor parts and pipeline are not {settings.workers} workers"
    parts = data * (settings.microbatches or (1,))[0]
    if settings.batch_size[0] % parts:
        yield f"{settings.batch_size[0]} examples are not divisible by {parts} micro-batches of all replicas"
    if (stages := (settings.stages or (pipeline,))[0]) % pipeline:
        yield f"{stages} stages are not divisible by {pipeline} workers"
    if pipeline > 1 and settings.methods == PlanSettings().methods:
        yield "a pipeline without a method"
