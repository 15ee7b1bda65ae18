"""A plan as a TOML file, which `stretto train --plan` runs and `stretto show --plan` draws."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import tomli_w

from stretto.cost.attained import Attained
from stretto.cost.cluster import Device
from stretto.errors import UsageError
from stretto.options.kinds import check_values, parse_toml
from stretto.plan.branch_and_bound import Plan
from stretto.plan.candidate_costs import Prices
from stretto.plan.objective import Objective
from stretto.plan.refine import standard_error, terms
from stretto.plan.ways import spread_of
from stretto.simulate.network import LATE_DRAWS

TRAIN, PLAN, PREDICTED, MEASURED, OPTIONS = "train", "plan", "predicted", "measured", "model_options"

PARTS = ("computing", "below peak", "memory traffic", "launches")  # of the seconds of computing
SHOWN = {"method": str, "stages": int, "pipeline": int}  # of what a plan chooses: what draws it


def choices(plan: Plan) -> dict[str, Any]:
    """What a plan chooses, as plain data."""
    c = plan.candidate
    return {
        "method": str(c),
        "workers": c.workers,
        "pipeline": c.pipeline,
        "data": c.mesh.data,
        "tensor": c.mesh.tensor,
        "space": list(c.mesh.space),
        "stages": c.stages,
        "bounds": list(plan.bounds),
        "microbatches": c.microbatches,
        "sequence_parallel": c.sequence,
        "recompute": c.recompute,
        "sharding": c.shard,
        "batch_size": c.batch,
    }


def content(
    plan: Plan,
    prices: Prices,
    aim: Objective,
    *,
    model: str,
    trained: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None = None,
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contents of a plan's file. `trained` are the settings of its model, if `stretto train` can train it.

    `options` are those of a network without data, which cannot be trained. `measured` is what a trial of the plan came
    to, if there was one.
    """
    c, problem = plan.candidate, prices.problem
    penalty = aim.penalty(c)
    placement = {"placement": list(c.placement or range(c.workers))} if problem.cluster.is_uneven else {}
    known: dict[str, Any] = {
        "model": model,
        "cluster": problem.cluster.name,
        **({OPTIONS: dict(options)} if options else {}),
        PLAN: {**choices(plan), **placement, "dtype": prices.dtype, "optimizer": problem.optimizer},
        PREDICTED: {
            "seconds_per_step": plan.seconds,
            "by": predicted_by(plan, prices),
            "closed_form_seconds": plan.formula,
            "bytes_per_worker": [round(num_bytes) for num_bytes in plan.bytes],
            "memory_per_worker": [round(num_bytes) for num_bytes in prices.places_of(c).memory],
            "examples_per_second": c.batch / plan.seconds,
            "seconds": {
                name.replace(" ", "_"): value
                for name, value in split_computing(terms(plan, prices), plan, prices).items()
            },
        },
        "objective": {"goal": aim.goal, "value": plan.value},
    }
    if (spread := spread_of(c, problem.spreads)) is not None:
        known[PREDICTED]["spread"] = spread
    if (error := standard_error(plan, prices)) is not None:
        known[PREDICTED]["standard_error"] = error
    if plan.money is not None:
        known[PREDICTED]["money_per_step"] = plan.money
    if plan.joules is not None:
        known[PREDICTED]["joules_per_step"] = plan.joules
    if measured is not None:
        known[MEASURED] = dict(measured)
    if aim.goal == "loss":
        known["objective"] |= {
            "steps": aim.steps(c),
            "critical_batch": aim.critical_batch,
            "penalty": penalty.factor,
            "penalty_is": penalty.source,
            **{f"penalty_{key}": value for key, value in penalty.remarks.items()},
        }
    if trained is not None:
        known[TRAIN] = training_settings(plan, trained)
    return known


def predicted_by(plan: Plan, prices: Prices) -> str:
    """How a plan's seconds were predicted, in words."""
    if not plan.simulated:
        return "closed form"
    if any(link.lateness for link in prices.places_of(plan.candidate).ahead):
        return f"simulation, mean of {LATE_DRAWS} draws of late messages"
    return "simulation"


def limits(device: Device) -> tuple[Device, ...]:
    """The device with one limit more each: FLOPs at the peak, what kernels attain, memory, starts of kernels."""
    attained = device.attained or Attained()
    without_starts = replace(device, attained=replace(attained.without_host(), per_kernel=0.0))
    below_peak = replace(without_starts, memory_bandwidth=inf, on_chip_bandwidth=None, on_chip_memory=None)
    return replace(below_peak, attained=None, variation=None), below_peak, without_starts, device


def split_computing(terms: Mapping[str, float], plan: Plan, prices: Prices) -> dict[str, float]:
    """The terms of a plan with those of computing in PARTS, where devices say what they attain.

    Each part is what computing takes longer on devices that have one limit more, as a share of the whole.
    """
    cluster = prices.problem.cluster
    if all(device.attained is None for device in cluster.devices.values()):
        return dict(terms)
    seconds = []
    for devices in zip(*map(limits, cluster.devices.values()), strict=True):
        limited = replace(cluster, devices=dict(zip(cluster.devices, devices, strict=True)))
        seconds.append(computing_seconds(plan, Prices(prices.problem.but(cluster=limited))))
    if not seconds[-1]:
        return dict(terms)
    scale = terms["computing"] / seconds[-1]
    steps = [seconds[0], *(after - before for before, after in pairwise(seconds))]
    return {**terms, **{name: scale * step for name, step in zip(PARTS, steps, strict=True)}}


def computing_seconds(plan: Plan, prices: Prices) -> float:
    """Seconds of all stages' forwards and backwards of a micro-batch."""
    c, total = plan.candidate, 0.0
    for s, (start, end) in enumerate(pairwise(plan.bounds)):
        times = prices.slowest(c, c.worker_of(s))
        total += float(times.forward[start, end] + times.backward[start, end])
    return total


def training_settings(plan: Plan, trained: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with which `stretto train` runs a plan; `trained` are those of its model."""
    c = plan.candidate
    axes: dict[str, Any] = {"data_parallel": c.mesh.data, "tensor": c.mesh.tensor, "space": list(c.mesh.space)}
    used_axes = {key: value for key, value in axes.items() if value not in (1, [1, 1])}
    shard = {} if c.shard == "none" else {"sync": c.shard}
    recompute = {} if c.form.recompute == "none" else {"recompute": c.form.recompute}
    workers = {"workers": c.workers} if c.workers > 1 else {}
    placed = {"placement": list(c.placement)} if c.workers > 1 and c.placement else {}
    cut = {"method": str(c), "stages": c.stages, "bounds": list(plan.bounds)}
    return {**trained, **cut, **workers, **placed, **used_axes, **shard, **recompute, "batch_size": c.batch}


def script(plan: Plan, bounds: Sequence[int]) -> str:
    """A line of Python that trains a user's own model by the plan; `bounds` are those of the model's layers."""
    c = plan.candidate
    lengths = {"data": c.mesh.data, "tensor": c.mesh.tensor, "space": c.mesh.space}
    axes = ", ".join(f"{axis}={length}" for axis, length in lengths.items() if length not in (1, (1, 1)))
    mesh = f", mesh=stretto.Mesh({axes})" if axes else ""
    shard = "" if c.shard == "none" else f', sync="{c.shard}"'
    again = "" if c.form.recompute == "none" else f', recompute="{c.form.recompute}"'
    cut = f"stretto.split(model, {list(bounds)}, example=x)"
    return f'stretto.Trainer({cut}, loss, optimizer, "{c}", workers={c.pipeline}{mesh}{shard}{again})'


def to_toml(known: Mapping[str, Any]) -> str:
    """The contents of a plan's file as TOML text."""
    return (
        "# Written by stretto plan. Seconds, bytes, joules; money in the unit of the cluster's prices.\n"
        + tomli_w.dumps(known)
    )


def read_plan(file: Path) -> dict[str, Any]:
    """The contents of a plan's file. Raises UsageError if it cannot be read or is no plan."""
    try:
        known = parse_toml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"no plan in {file}: {error.strerror}; write one with stretto plan --out {file}") from error
    except ValueError as error:
        raise UsageError(f"{file} is no TOML file: {error}") from error
    if not all(isinstance(known.get(key), dict) for key in (PLAN, PREDICTED)):
        raise UsageError(
            f"{file} is no plan: [{PLAN}] or [{PREDICTED}] is missing; write one with stretto plan --out FILE"
        )
    check_values(f"{file}", known, {TRAIN: dict[str, Any], OPTIONS: dict[str, Any]})
    check_values(f"{file}: [{TRAIN}]", known.get(TRAIN, {}), {OPTIONS: dict[str, Any]})
    check_values(f"{file}: [{PLAN}]", known[PLAN], SHOWN)
    return known


def chosen_in(file: Path) -> dict[str, Any]:
    """What the plan in a file chooses, with all that draws it. Raises UsageError where something is missing."""
    chosen: dict[str, Any] = read_plan(file)[PLAN]
    if lacking := [key for key in SHOWN if key not in chosen]:
        raise UsageError(f"{file}: [{PLAN}] lacks {', '.join(lacking)}: write it anew with stretto plan --out {file}")
    return chosen


def training_of(file: Path) -> dict[str, Any]:
    """The settings for `stretto train` in a plan's file. Raises UsageError if it has none."""
    known = read_plan(file)
    if TRAIN not in known:
        raise UsageError(
            f"{file} plans {known.get('model')}, which stretto train has no data for: it can only be shown"
        )
    found: dict[str, Any] = known[TRAIN]
    return found


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, first value, second value) of each key in which two plans differ."""
    first, second = flatten(one), flatten(other)
    keys = [key for key in dict.fromkeys((*first, *second)) if not key.startswith(f"{TRAIN}.")]
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def flatten(nest: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one dict, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in nest.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
