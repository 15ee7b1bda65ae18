"""What stretto plan --scale prints and draws."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.failures import wanted_words
from stretto.cli.output import aligned, writing_to

if TYPE_CHECKING:
    from stretto.plan import Problem
    from stretto.plan.reliability import Reliability
    from stretto.plan.scaling_study import Scaled
    from stretto.report.scaling import ScaledPlan


def scaled(
    problem: "Problem", model: str, numbers: Sequence[int], file: Path,
    *, per_worker: bool, known: "Reliability | None" = None, wanted: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Plan for every number of workers, write the page, and give both as plain data.

    `known` is of failures; `wanted` are the names of what it takes to know them, if something is missing.
    """
    from dataclasses import asdict

    from stretto.plan.scaling_study import batches, scaling
    from stretto.report.scaling import build_scaling

    rows = [row_of(plan) for plan in scaling(problem, numbers, per_worker=per_worker, known=known)]
    size = problem.batch_sizes[0] * (problem.workers if per_worker else 1)
    by_batch = [row_of(plan) for plan in batches(problem, size)]
    facts: dict[str, str] = {
        "Model": f"{model}, {len(problem.layers)} layers, {problem.costs.dtype}",
        "Cluster": f"{problem.cluster.name}, {problem.cluster.num_workers:,} workers, more nodes where it takes them",
        "Batch": f"{problem.batch_sizes[0]:,} examples{' of each worker' if per_worker else ''}",
        "Methods": ", ".join(problem.names),
        **failure_facts(rows, known),
    }
    with writing_to(file):
        build_scaling(file, model=model, cluster=problem.cluster.name, scaled=rows, batches=by_batch,
                      per_worker=per_worker, facts=facts)  # fmt: skip
    return {
        "page": str(file), "rows": [asdict(row) for row in rows], "batches": [asdict(row) for row in by_batch],
        "goodput_needs": list(wanted),
    }  # fmt: skip


def failure_facts(rows: Sequence["ScaledPlan"], known: "Reliability | None") -> dict[str, str]:
    """What is known of failures, for the head of the page."""
    from stretto.plan.explain import size
    from stretto.report.units import number, seconds

    first = next((row for row in rows if row.goodput is not None), None)
    if known is None or first is None:
        return {}
    hours = f"{number((first.mtbf_seconds or 0.0) * first.used / 3600)} h" if first.mtbf_seconds else "infinite"
    return {
        "Failures": f"MTBF of a worker {hours}; a failure stops all; a restart takes {seconds(known.restart_seconds)}",
        "Checkpoints": f"{size(first.checkpoint_bytes or 0.0)} in {seconds(first.checkpoint_seconds)}, "
        + ("at the best interval" if known.checkpoint_interval is None
           else f"every {seconds(known.checkpoint_interval)} of work"),
    }  # fmt: skip


def row_of(scaled: "Scaled") -> "ScaledPlan":
    """A row of the table and a point of the charts; without a plan where none fits."""
    from stretto.report.scaling import ScaledPlan

    plan = scaled.plan
    if plan is None:
        return ScaledPlan(way=scaled.way, workers=scaled.workers, batch=scaled.batch)
    c = plan.candidate
    axes = [f"{name} {many}" for name, many in (("data", c.mesh.data), ("pipeline", c.pipeline),
            ("tensor", c.mesh.tensor)) if many > 1]  # fmt: skip
    axes += [f"space {c.mesh.space[0]}x{c.mesh.space[1]}"] if c.mesh.space != (1, 1) else []
    row = ScaledPlan(
        way=scaled.way, workers=scaled.workers, batch=scaled.batch, plan=", ".join([str(c), *axes]), used=c.workers,
        seconds=plan.seconds, throughput=scaled.examples_per_second, efficiency=scaled.efficiency,
        utilisation=scaled.utilisation, simulated=plan.simulated,
    )  # fmt: skip
    left = scaled.goodput
    if left is None:
        return row
    return replace(
        row, goodput=left.share, useful=scaled.useful_per_second, interval_seconds=left.interval_seconds,
        mtbf_seconds=None if math.isinf(left.mtbf_seconds) else left.mtbf_seconds,
        checkpoint_seconds=left.checkpoint_seconds, checkpoint_bytes=left.checkpoint_bytes,
    )  # fmt: skip


def in_words(facts: Mapping[str, Any]) -> str:
    """Two tables: plans by the number of workers, and plans by the batch size."""
    from stretto.report.scaling import ScaledPlan, table

    rows = table([ScaledPlan(**row) for row in facts["rows"]])
    by_batch = [(f"{row.batch:,}", row.way, *row.cells[3:4], *row.cells[5:7], row.cells[8])
              for row in (ScaledPlan(**row) for row in facts["batches"]) if row.seconds is not None]  # fmt: skip
    workers = facts["batches"][0]["workers"]
    lines = [aligned(rows)]
    if facts["goodput_needs"]:
        lines += ["", f"for goodput under failures give {wanted_words(facts['goodput_needs'])}"]
    lines += ["", f"against the batch, on {workers:,} workers"]
    lines += [aligned([("batch", "way", "plan", "a step", "examples/s", "utilisation"), *by_batch])]
    return "\n".join([*lines, f"drawn in {facts['page']}"])
