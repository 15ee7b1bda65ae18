"""What stretto plan --scale prints and draws."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import aligned, writing_to

if TYPE_CHECKING:
    from stretto.plan import Problem
    from stretto.plan.scaling_study import Scaled
    from stretto.report.scaling import ScaledPlan


def scaled(problem: "Problem", model: str, numbers: Sequence[int], file: Path, *, per_worker: bool) -> dict[str, Any]:
    """Plan for every number of workers, write the page, and give both as plain data."""
    from dataclasses import asdict

    from stretto.plan.scaling_study import batches, scaling
    from stretto.report.scaling import build_scaling

    rows = [row_of(plan) for plan in scaling(problem, numbers, per_worker=per_worker)]
    size = problem.batch_sizes[0] * (problem.workers if per_worker else 1)
    by_batch = [row_of(plan) for plan in batches(problem, size)]
    facts = {
        "Model": f"{model}, {len(problem.layers)} layers, {problem.costs.dtype}",
        "Cluster": f"{problem.cluster.name}, {problem.cluster.num_workers:,} workers, more nodes where it takes them",
        "Batch": f"{problem.batch_sizes[0]:,} examples{' of each worker' if per_worker else ''}",
        "Methods": ", ".join(problem.names),
    }
    with writing_to(file):
        build_scaling(file, model=model, cluster=problem.cluster.name, scaled=rows, batches=by_batch,
                      per_worker=per_worker, facts=facts)  # fmt: skip
    return {"page": str(file), "rows": [asdict(row) for row in rows], "batches": [asdict(row) for row in by_batch]}


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
    return ScaledPlan(
        way=scaled.way, workers=scaled.workers, batch=scaled.batch, plan=", ".join([str(c), *axes]), used=c.workers,
        seconds=plan.seconds, throughput=scaled.examples_per_second, efficiency=scaled.efficiency,
        utilisation=scaled.utilisation, simulated=plan.simulated,
    )  # fmt: skip


def in_words(facts: Mapping[str, Any]) -> str:
    """Two tables: plans by the number of workers, and plans by the batch size."""
    from stretto.report.scaling import HEADS, ScaledPlan

    rows = [ScaledPlan(**row).cells for row in facts["rows"]]
    by_batch = [(f"{row.batch:,}", row.way, *row.cells[3:4], *row.cells[5:7], row.cells[8])
              for row in (ScaledPlan(**row) for row in facts["batches"]) if row.seconds is not None]  # fmt: skip
    workers = facts["batches"][0]["workers"]
    lines = [aligned([HEADS, *rows]), "", f"against the batch, on {workers:,} workers"]
    lines += [aligned([("batch", "way", "plan", "a step", "examples/s", "utilisation"), *by_batch])]
    return "\n".join([*lines, f"drawn in {facts['page']}"])
