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

    rows = [row_of(each) for each in scaling(problem, numbers, per_worker=per_worker)]
    size = problem.batch_sizes[0] * (problem.workers if per_worker else 1)
    around = [row_of(each) for each in batches(problem, size)]
    facts = {
        "Model": f"{model}, {len(problem.layers)} layers, {problem.costs.dtype}",
        "Cluster": f"{problem.cluster.name}, {problem.cluster.num_workers:,} workers, more nodes where it takes them",
        "Batch": f"{problem.batch_sizes[0]:,} examples{' of each worker' if per_worker else ''}",
        "Methods": ", ".join(problem.names),
    }
    with writing_to(file):
        build_scaling(file, model=model, cluster=problem.cluster.name, scaled=rows, batches=around,
                      per_worker=per_worker, facts=facts)  # fmt: skip
    return {"page": str(file), "rows": [asdict(row) for row in rows], "batches": [asdict(row) for row in around]}


def row_of(each: "Scaled") -> "ScaledPlan":
    """What tables and charts show."""
    from stretto.report.scaling import ScaledPlan

    plan = each.plan
    if plan is None:
        return ScaledPlan(way=each.way, workers=each.workers, batch=each.batch)
    c = plan.candidate
    axes = [f"{name} {many}" for name, many in (("data", c.mesh.data), ("pipeline", c.pipeline),
            ("tensor", c.mesh.tensor)) if many > 1]  # fmt: skip
    axes += [f"space {c.mesh.space[0]}x{c.mesh.space[1]}"] if c.mesh.space != (1, 1) else []
    return ScaledPlan(
        way=each.way, workers=each.workers, batch=each.batch, plan=", ".join([str(c), *axes]), used=c.workers,
        seconds=plan.seconds, throughput=each.examples_per_second, efficiency=each.efficiency,
        utilisation=each.utilisation, simulated=plan.simulated,
    )  # fmt: skip


def in_words(told: Mapping[str, Any]) -> str:
    """The table for people."""
    from stretto.report.scaling import HEADS, ScaledPlan

    rows = [ScaledPlan(**each).cells for each in told["rows"]]
    around = [(f"{row.batch:,}", row.way, *row.cells[3:4], *row.cells[5:7], row.cells[8])
              for row in (ScaledPlan(**each) for each in told["batches"]) if row.seconds is not None]  # fmt: skip
    workers = told["batches"][0]["workers"]
    lines = [aligned([HEADS, *rows]), "", f"against the batch, on {workers:,} workers"]
    lines += [aligned([("batch", "way", "plan", "a step", "examples/s", "utilisation"), *around])]
    return "\n".join([*lines, f"drawn in {told['page']}"])
