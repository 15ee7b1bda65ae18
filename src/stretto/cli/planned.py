"""What stretto plan writes and says of the plan it found."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.output import aligned, print_json, write
from stretto.cli.penalties import in_words as penalties_in_words
from stretto.cli.scaling import in_words as scaling_in_words

if TYPE_CHECKING:
    from stretto.plan import Found, Objective, Plan, Problem
    from stretto.plan.candidate_costs import Prices
    from stretto.study.model_costs import Costed

SEEN = 1e-6  # of a step: terms that are less are rounding


def written(
    best: "Plan", prices: "Prices", aim: "Objective", model: "Costed", out: Path, export: str | None
) -> dict[str, Any]:
    """Write the plan, and what others read of it."""
    from stretto.plan.plan_file import content, to_toml

    known = content(best, prices, aim, model=model.name, trained=model.trained)
    known["plan"]["bounds"] = model.bounds(best.bounds)
    write(out, to_toml(known))
    if export is not None:
        exported(best, model, out)
    return known


def exported(best: "Plan", model: "Costed", out: Path) -> None:
    """Write the schedule and where stages begin, for torch.distributed.pipelining, beside the plan."""
    import json

    from stretto.methods import method
    from stretto.plan.plan_file import split_points
    from stretto.schedule.export import to_csv

    c = best.candidate
    schedule, _ = method(str(c)).plan(c.stages, c.pipeline)
    write(out.with_suffix(".csv"), to_csv(schedule))
    begin = split_points(best.bounds, model.layers)
    write(out.with_suffix(".split.json"), f"{json.dumps(begin, indent=1)}\n")


def summary(best: "Plan", found: "Found", known: Mapping[str, Any], model: "Costed", out: Path) -> dict[str, Any]:
    """The plan that was written as plain data, and the search; of a user's own model the line that trains it."""
    from stretto.plan.plan_file import script

    told = {
        "plan": str(out),
        "predicted_seconds": best.seconds,
        "predicted_bytes": [round(each) for each in best.bytes],
        "candidates": found.candidates,
        "priced": found.priced,
        "search_seconds": found.seconds,
        "chosen": known["plan"],
        "predicted": known["predicted"],
        "objective": known["objective"],
    }
    return told if model.positions is None else told | {"script": script(best, known["plan"]["bounds"])}


def explained(problem: "Problem", aim: "Objective", best: "Plan", prices: "Prices") -> list[dict[str, Any]]:
    """What every other choice would change, as plain data."""
    from stretto.plan.explain import alternatives

    return [
        {"choice": each.choice, "fits": False} if each.plan is None else {
            "choice": each.choice, "fits": True, "method": str(each.plan.candidate), "seconds": each.plan.formula,
            "times": each.plan.formula / best.formula, "term": each.term, "more_seconds": each.more,
        }
        for each in alternatives(problem, aim, best, prices)
    ]  # fmt: skip


def points(problem: "Problem", aim: "Objective") -> list[dict[str, Any]]:
    """The frontier as plain data."""
    from stretto.plan.explain import frontier

    return [
        {"method": str(p.plan.candidate), "workers": p.plan.candidate.workers, "seconds": p.plan.seconds,
         "bytes": round(p.memory), "money": p.plan.money, "pipeline": p.plan.candidate.pipeline,
         "tensor": p.plan.candidate.mesh.tensor, "data": p.plan.candidate.mesh.data, "sharding": p.plan.candidate.shard}
        for p in frontier(problem, aim)
    ]  # fmt: skip


def tell_difference(files: Sequence[Path], *, json: bool) -> None:
    """Print what two plans differ in."""
    from stretto.errors import UsageError
    from stretto.plan.plan_file import difference, read_plan

    if len(files) != 2:
        raise UsageError(f"diff takes two plans, not {len(files)}: --diff A.toml B.toml")
    rows = difference(*(read_plan(file) for file in files))
    if json:
        print_json({"differences": [{"key": key, "a": one, "b": other} for key, one, other in rows]})
        return
    names = [str(file) for file in files]
    print(aligned([("", *names), *((key, shown(one), shown(other)) for key, one, other in rows)]) if rows else "equal")


def shown(value: Any) -> str:
    """A value in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def in_words(told: Mapping[str, Any]) -> str:
    """The plan for people."""
    lines = [aligned(rows_of(told["chosen"], told["predicted"]))]
    if told["objective"]["goal"] == "loss":
        lines += ["", *penalties_in_words(told["objective"], told["penalties"])]
    if "explain" in told:
        rows = [why(each) for each in told["explain"]] or [("none", "", "", "")]
        lines += ["", "one other choice at a time, by closed forms", aligned(rows)]
    if "frontier" in told:
        lines += ["", "not beaten in time, memory and money", aligned([row_of(each) for each in told["frontier"]])]
    if "scaling" in told:
        lines += ["", scaling_in_words(told["scaling"])]
    if "script" in told:
        processes = told["chosen"]["workers"]
        lines += ["", f"torchrun --nproc-per-node {processes} your script, with", told["script"]]
    looked = f"{told['candidates']} candidates, {told['priced']} priced, in {told['search_seconds']:.2f} s"
    return "\n".join([*lines, "", f"{looked}; written to {told['plan']}"])


def rows_of(chosen: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is chosen, what a step takes and what that is made of."""
    from stretto.plan.explain import size
    from stretto.report.units import duration

    axes = " x ".join(f"{axis} {chosen[axis]}" for axis in ("data", "pipeline", "tensor", "space"))
    seconds = predicted["seconds_per_step"]
    return [
        ("method", chosen["method"]),
        ("axes", f"{axes} = {chosen['workers']} workers"),
        ("stages begin at", " ".join(map(str, chosen["bounds"][:-1]))),
        ("sharding", chosen["sharding"]),
        ("batch size", str(chosen["batch_size"])),
        ("a step", f"{duration(seconds)} (by {predicted['by']})"),
        *(
            (f"  {name.replace('_', ' ')}", duration(value))
            for name, value in predicted["seconds"].items()
            if abs(value) > SEEN * seconds
        ),
        ("memory", f"{size(max(predicted['bytes_per_worker']))} on the fullest worker"),
    ]


def row_of(point: Mapping[str, Any]) -> tuple[str, ...]:
    """A plan of the frontier."""
    from stretto.plan.explain import size
    from stretto.report.units import duration

    return (
        point["method"], f"{point['workers']} workers", duration(point["seconds"]), size(point["bytes"]),
        shown(point["money"]),
    )  # fmt: skip


def why(each: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A row about another choice."""
    from stretto.report.units import duration

    if not each["fits"]:
        return each["choice"], "does not fit", "", ""
    more = each["more_seconds"]
    changed = f"{each['term']} {'+' if more >= 0 else '-'}{duration(abs(more))}"
    return each["choice"], each["method"], f"{duration(each['seconds'])} ({each['times']:.3g} times)", changed
