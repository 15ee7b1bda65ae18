"""What stretto plan writes and prints of the plan that it has found."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.cli.failures import rows_of as goodput_rows
from stretto.cli.measured_plans import in_words as trials_in_words
from stretto.cli.output import aligned, print_json, write, writing_to
from stretto.cli.penalty_options import in_words as penalties_in_words
from stretto.cli.scaling import in_words as scaling_in_words
from stretto.errors import UsageError
from stretto.options.import_object import is_function
from stretto.settings.planning import EXPORTED

if TYPE_CHECKING:
    from stretto.plan import Found, Objective, Plan, Problem
    from stretto.plan.candidate_costs import Prices
    from stretto.study.model_costs import Costed

FAR = 1.5  # times: a correction that says that the parts of a step are not understood
NEGLIGIBLE = 1e-6  # share of a step's time: smaller terms are rounding errors


def written(
    best: "Plan",
    prices: "Prices",
    objective: "Objective",
    model: "Costed",
    out: Path,
    export: str | None,
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the plan's file, and with `export` torch's files beside it; return the plan's as plain data.

    `measured` is what a trial of the plan came to, if there was one.
    """
    from stretto.plan.plan_file import content, to_toml

    known = content(
        best, prices, objective, model=model.name, trained=model.trained, options=model.options, measured=measured
    )
    known["plan"]["bounds"] = model.bounds(best.bounds)
    text = to_toml(known)
    known["kept"] = kept(out, text)
    write(out, text)
    if export is not None:
        exported(best, model, out)
    return known


def kept(out: Path, text: str) -> str | None:
    """Rename another plan that is in the way; its new name, None if there is none."""
    if not out.is_file() or out.read_text(encoding="utf-8", errors="replace") == text:
        return None
    names = (out.with_name(f"{out.stem}.{number}{out.suffix}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    with writing_to(out):
        out.rename(free)
    return str(free)


def exported(best: "Plan", model: "Costed", out: Path) -> None:
    """Write the schedule and where stages begin, for torch.distributed.pipelining, beside the plan."""
    import json

    from stretto.methods import method
    from stretto.plan.plan_file import split_points
    from stretto.schedule.csv_file import to_csv

    c = best.candidate
    schedule, _ = method(str(c)).plan(c.stages, c.pipeline)
    listed, beginnings = map(out.with_suffix, EXPORTED)
    write(listed, to_csv(schedule))
    begin = split_points(best.bounds, model.layers)
    write(beginnings, f"{json.dumps(begin, indent=1)}\n")


def summary(best: "Plan", found: "Found", file: Mapping[str, Any], model: "Costed", out: Path) -> dict[str, Any]:
    """What `stretto plan --json` prints of the plan that was written and of the search, as plain data.

    For a user's own model that includes the line of Python that trains it.
    """
    from stretto.plan.plan_file import script
    from stretto.plan.ways import byte_correction, ways_of

    facts: dict[str, Any] = {
        "plan": str(out),
        "kept": file["kept"],
        "predicted_seconds": best.seconds,
        "predicted_bytes": [round(many) for many in best.bytes],
        "candidates": found.candidates,
        "priced": found.priced,
        "proven": found.proven,
        "search_seconds": found.seconds,
        "chosen": file["plan"],
        "predicted": file["predicted"],
        "objective": file["objective"],
        "corrections": {way: found.prices.problem.ratios.get(way, 1.0) for way in ways_of(best.candidate)},
        "correction_of_bytes": byte_correction(best.candidate, found.prices.problem.byte_ratios),
        "doubts": doubts_of(best, found),
        "between_stages": model.passed(best.bounds),
    }
    if model.options:
        options, parameters = dict(model.options), model.costs.parameters
        facts["network"] = {"model": model.name, "model_options": options, "parameters": parameters}
    if found.prices.problem.cluster.is_uneven:
        facts["places"] = places_of(best, found.prices)
    trained = {} if model.trained is None else model.trained
    texts = [(key, text) for key, value in trained.items() for text in (value if isinstance(value, list) else [value])]
    functions = [(key, text) for key, text in texts if isinstance(text, str) and is_function(text)]
    if functions:
        words = [
            "stretto",
            "train",
            "--plan",
            str(out),
            *(word for key, value in functions for word in (f"--{key}", value)),
        ]
        facts["command"] = shlex.join(words)
    return facts if model.positions is None else facts | {"script": script(best, file["plan"]["bounds"])}


def places_of(best: "Plan", prices: "Prices") -> list[dict[str, Any]]:
    """For each worker of the pipeline, its stages and the workers of the cluster that hold them, as plain data."""
    c, kinds = best.candidate, prices.problem.cluster.kinds
    return [
        {
            "stages": [s for s in range(c.stages) if c.worker_of(s) == worker],
            "workers": list(ranks),
            "devices": [str(kind) for kind in dict.fromkeys(kinds[rank] for rank in ranks)],
        }
        for worker, ranks in enumerate(prices.places_of(c).workers.ranks)
    ]


def doubts_of(best: "Plan", found: "Found") -> list[str]:
    """Why the predicted seconds may be wrong: doubts about the cluster's figures, and what is beyond them."""
    from stretto.cost.collective import NAMES
    from stretto.plan.ways import ways_of

    problem, c = found.prices.problem, best.candidate
    doubts = list(problem.cluster.doubts)
    measured = [link.collectives[name].processes for link in problem.cluster.links.values() for name in NAMES
                if name in link.collectives]  # fmt: skip
    sharing = max(c.mesh.data, c.mesh.inside)
    if measured and sharing > max(measured):
        doubts.append(f"collectives among {sharing} processes follow from what {max(measured)} took")
    for way in ways_of(c):
        ratio = problem.ratios.get(way, 1.0)
        if max(ratio, 1 / ratio) > FAR:
            doubts.append(
                f"a measured step, {way}, took {ratio:.2g} times what its parts promise: plans follow the step"
            )
    return doubts


def explained(problem: "Problem", objective: "Objective", best: "Plan", prices: "Prices") -> list[dict[str, Any]]:
    """Of every other choice, whether it fits and how many seconds more a step takes, as plain data."""
    from stretto.plan.explain import alternatives

    return [
        {"choice": other.choice, "fits": False} if other.plan is None else {
            "choice": other.choice, "fits": True, "method": str(other.plan.candidate), "seconds": other.plan.formula,
            "times": other.plan.formula / best.formula, "term": other.term, "more_seconds": other.more,
        }
        for other in alternatives(problem, objective, best, prices)
    ]  # fmt: skip


def points(problem: "Problem", objective: "Objective") -> list[dict[str, Any]]:
    """The plans that no other beats in time, memory, money and energy, as plain data."""
    from stretto.plan.explain import frontier

    return [
        {"method": str(p.plan.candidate), "workers": p.plan.candidate.workers, "seconds": p.plan.seconds,
         "bytes": round(p.memory), "money": p.plan.money, "joules": p.plan.joules,
         "batch_size": p.plan.candidate.batch, "microbatches": p.plan.candidate.microbatches,
         "recompute": p.plan.candidate.recompute, "pipeline": p.plan.candidate.pipeline,
         "tensor": p.plan.candidate.mesh.tensor, "data": p.plan.candidate.mesh.data, "sharding": p.plan.candidate.shard}
        for p in frontier(problem, objective)
    ]  # fmt: skip


def tell_difference(files: Sequence[Path], *, json: bool) -> None:
    """Print the keys in which two plans differ, with both values. Raises UsageError for any other number of plans."""
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


def in_words(facts: Mapping[str, Any]) -> str:
    """What `stretto plan` prints: the plan, a step's time and memory, and what was asked for beside them."""
    plan_rows = rows_of(facts["chosen"], facts["predicted"])
    plan_rows[3:3] = place_rows(facts.get("places", ()))
    plan_rows += goodput_rows(facts["goodput"]) if "goodput" in facts else []
    if "network" in facts:
        plan_rows.append(("model", network_in_words(**facts["network"])))
    lines = [aligned([*plan_rows, *passed_rows(facts["between_stages"])])]
    lines += [f"doubtful: {doubt}" for doubt in facts["doubts"]]
    if "tried" in facts:
        lines += ["", trials_in_words(facts)]
    if facts["objective"]["goal"] == "loss":
        lines += ["", *penalties_in_words(facts["objective"], facts["penalties"])]
    if "explain" in facts:
        rows = [why(choice) for choice in facts["explain"]] or [("none", "", "", "")]
        lines += ["", "one other choice at a time, by closed forms", aligned(rows)]
    if "frontier" in facts:
        lines += ["", "not beaten in time, memory, money and energy", aligned(frontier_rows(facts["frontier"]))]
    if "scaling" in facts:
        lines += ["", scaling_in_words(facts["scaling"])]
    if "command" in facts:
        lines += ["", f"{facts['command']}, or" if "script" in facts else facts["command"]]
    if "script" in facts:
        processes = facts["chosen"]["workers"]
        placed = ", rank by rank on the workers above" if facts["chosen"].get("placement") else ""
        lines += ["", f"torchrun --nproc-per-node {processes} your script{placed}, with", facts["script"]]
    searched = f"{facts['candidates']} candidates, {facts['priced']} priced, in {facts['search_seconds']:.2f} s"
    former = "" if facts["kept"] is None else f"; the former {facts['plan']} is kept as {facts['kept']}"
    return "\n".join([*lines, "", f"{searched}; written to {facts['plan']}{former}"])


def rows_of(chosen: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of what was chosen and what a step takes, with the parts of its time."""
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
            (f"  {name.replace('_', ' ')}", "none" if is_none(name, value, seconds) else duration(value))
            for name, value in predicted["seconds"].items()
            if abs(value) > NEGLIGIBLE * seconds or (name == "bubble" and chosen["pipeline"] > 1)
        ),
        ("memory", f"{size(max(predicted['bytes_per_worker']))} on the fullest worker"),
        *expense_rows(predicted, chosen["batch_size"]),
    ]


def expense_rows(predicted: Mapping[str, Any], batch: int) -> list[tuple[str, str]]:
    """Rows of the money and the energy of a step, where the cluster's file has prices or powers."""
    from stretto.report.units import energy, number

    money, joules = predicted.get("money_per_step"), predicted.get("joules_per_step")
    rows = [] if money is None else [("money", f"{number(money)} a step, {number(money / batch)} an example")]
    if joules is not None:
        rows.append(("energy", f"{energy(joules)} a step, {energy(joules / batch)} an example"))
    return rows


def network_in_words(model: str, model_options: Mapping[str, Any], parameters: int) -> str:
    """A network without data: its name, parameters and options."""
    return f"{model}, {parameters:,} parameters: {', '.join(f'{key} {value}' for key, value in model_options.items())}"


def place_rows(places: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A row for each worker of the pipeline: its stages, and which workers of the cluster hold them."""

    def listed(noun: str, numbers: Sequence[int]) -> str:
        return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"

    return [
        ("" if index else "placement",
         f"{listed('stage', each['stages'])} on {listed('worker', each['workers'])} ({', '.join(each['devices'])})")
        for index, each in enumerate(places)
    ]  # fmt: skip


def passed_rows(passed: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """A row of what passes from stage to stage, where some stages pass several tensors: the model is no chain there."""
    from stretto.plan.explain import size

    if all(each["tensors"] == 1 for each in passed):
        return []
    words = [
        f"{each['tensors']} tensor{'s' if each['tensors'] > 1 else ''} of {size(each['bytes_per_example'])} an example"
        for each in passed
    ]
    return [("between stages", f"{', '.join(words)}: branches pass through the stages that they cross")]


def is_none(name: str, seconds: float, step: float) -> bool:
    """Whether a part of a step is a bubble too short to be one."""
    from stretto.schedule.draw import RESOLUTION

    return name == "bubble" and seconds < RESOLUTION * step


def frontier_rows(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row of heads, and one about each plan of the frontier; money and energy only where they are known."""
    from stretto.plan.explain import size
    from stretto.report.units import duration, energy, number

    known = [key for key in ("money", "joules") if any(point[key] is not None for point in points)]
    costs = {"money": number, "joules": energy}
    heads = {"money": "money a step", "joules": "energy a step"}
    rows: list[tuple[str, ...]] = [("method", "workers", "a step", "memory", *(heads[key] for key in known))]
    for point in points:
        expenses = (costs[key](point[key]) for key in known)
        rows.append(
            (axes_of(point), str(point["workers"]), duration(point["seconds"]), size(point["bytes"]), *expenses)
        )
    return rows


def axes_of(point: Mapping[str, Any]) -> str:
    """The method of a plan of the frontier, with the axes that it uses."""
    axes = [f"{axis} {point[axis]}" for axis in ("data", "pipeline", "tensor") if point[axis] > 1]
    sharding = [] if point["sharding"] == "none" else [point["sharding"]]
    return ", ".join([point["method"], *axes, *sharding])


def why(other: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A row about another choice: its method, a step's time, and the part of it that changes most."""
    from stretto.report.units import duration

    if not other["fits"]:
        return other["choice"], "does not fit", "", ""
    more = other["more_seconds"]
    changed = f"{other['term']} {'+' if more >= 0 else '-'}{duration(abs(more))}"
    return other["choice"], other["method"], f"{duration(other['seconds'])} ({other['times']:.3g} times)", changed
