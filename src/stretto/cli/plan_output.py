"""What stretto plan writes and prints of the plan that it has found, and of failures: goodput, how often to save."""

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.cli.output import aligned, print_json, write, writing_to
from stretto.cost import Cluster
from stretto.cost.collective import NAMES
from stretto.errors import UsageError
from stretto.methods import method
from stretto.optim.by_name import needs_rate
from stretto.options.import_object import is_function
from stretto.plan import Candidate, Found, Objective, Plan, Problem
from stretto.plan.candidate_costs import Prices
from stretto.plan.explain import describe_axes, size
from stretto.plan.plan_file import content, difference, read_plan, script, to_toml
from stretto.plan.refine import simulate_if_short
from stretto.plan.reliability import Reliability, goodput_of, needs
from stretto.plan.trials import single_worker
from stretto.plan.ways import byte_correction, ways_of
from stretto.report import roofline
from stretto.report.units import duration, energy, number, percent, seconds
from stretto.schedule.csv_file import to_csv
from stretto.schedule.draw import RESOLUTION
from stretto.settings.planning import EXPORTED, FailureSettings, PlanOutput
from stretto.study import penalties, plan_trials
from stretto.study.model_costs import Costed

FAR = 1.5  # times: a correction that says that the parts of a step are not understood
RATE = "RATE"  # stands in a command for a rate that its user has to give
NEGLIGIBLE = 1e-6  # share of a step's time: smaller terms are rounding errors


def write_plan(
    best: Plan,
    prices: Prices,
    objective: Objective,
    model: Costed,
    output: PlanOutput,
    measured: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the plan's file, and with --export torch's files beside it; return the plan's as plain data.

    `measured` is what a trial of the plan came to, if there was one.
    """
    known = content(
        best, prices, objective, model=model.name, trained=model.trained, options=model.options, measured=measured
    )
    known["plan"]["bounds"] = model.bounds(best.bounds)
    text = to_toml(known)
    known["kept"] = rename_former(output.out, text)
    write(output.out, text)
    if output.export is not None:  # the schedule and where stages begin, for torch.distributed.pipelining
        c = best.candidate
        schedule, _ = method(str(c)).plan(c.stages, c.pipeline)
        listed, beginnings = map(output.out.with_suffix, EXPORTED)
        write(listed, to_csv(schedule))
        split_spec = {model.layers[bound]: "beginning" for bound in best.bounds[1:-1]}
        write(beginnings, f"{json.dumps(split_spec, indent=1)}\n")
    return known


def rename_former(out: Path, text: str) -> str | None:
    """Rename another plan that is in the way; its new name, None if there is none."""
    if not out.is_file() or out.read_text(encoding="utf-8", errors="replace") == text:
        return None
    names = (out.with_name(f"{out.stem}.{number}{out.suffix}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    with writing_to(out):
        out.rename(free)
    return str(free)


def summarize(
    best: Plan, found: Found, objective: Objective, file: Mapping[str, Any], model: Costed, out: Path
) -> dict[str, Any]:
    """What `stretto plan --json` prints of the plan that was written and of the search, as plain data.

    For a user's own model that includes the line of Python that trains it. `one_worker` is plain training on a single
    worker, None where that does not fit into its memory; `delays` are how many updates old each stage's gradients are.
    """
    problem, c = found.prices.problem, best.candidate
    single, chosen = single_worker(problem, objective, found.prices), method(str(c))
    stale = c.pipeline > 1 and not c.planned.drains
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
        "corrections": {way: problem.ratios.get(way, 1.0) for way in ways_of(c)},
        "correction_of_bytes": byte_correction(c, problem.byte_ratios),
        "one_worker": None
        if single is None
        else {"seconds": simulate_if_short(single, found.prices).seconds, "batch_size": single.candidate.batch},
        "delays": list(chosen.delays(chosen.plan(c.stages, c.pipeline)[0]).mean) if stale else [0.0] * c.stages,
        "doubts": doubts_of(c, problem),
        "between_stages": model.passed(best.bounds),
    }
    if model.options:
        facts["network"] = {
            "model": model.name,
            "model_options": dict(model.options),
            "parameters": model.costs.parameters,
        }
    if problem.cluster.is_uneven:
        kinds = problem.cluster.kinds
        facts["places"] = [
            {
                "stages": [s for s in range(c.stages) if c.worker_of(s) == worker],
                "workers": list(ranks),
                "devices": [str(kind) for kind in dict.fromkeys(kinds[rank] for rank in ranks)],
            }
            for worker, ranks in enumerate(found.prices.places_of(c).workers.ranks)
        ]
    trained = {} if model.trained is None else model.trained
    texts = [(key, text) for key, value in trained.items() for text in (value if isinstance(value, list) else [value])]
    functions = [(key, text) for key, text in texts if isinstance(text, str) and is_function(text)]
    if functions:
        named = [word for key, value in functions for word in (f"--{key}", value)]
        if "optimizer" in trained and needs_rate(trained["optimizer"]):
            named += ["--lr", RATE]
        facts["command"] = shlex.join(["stretto", "train", "--plan", str(out), *named])
    return facts if model.positions is None else facts | {"script": script(best, file["plan"]["bounds"])}


def doubts_of(c: Candidate, problem: Problem) -> list[str]:
    """Why the predicted seconds may be wrong: doubts about the cluster's figures, and what is beyond them."""
    doubts = list(problem.cluster.doubts)
    links = problem.cluster.links.values()
    measured = [link.collectives[name].processes for link in links for name in NAMES if name in link.collectives]
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


def tell_difference(files: Sequence[Path], *, json: bool) -> None:
    """Print the keys in which two plans differ, with both values. Raises UsageError for any other number of plans."""
    if len(files) != 2:
        raise UsageError(f"diff takes two plans, not {len(files)}: --diff A.toml B.toml")
    rows = difference(*(read_plan(file) for file in files))
    if json:
        print_json({"differences": [{"key": key, "a": one, "b": other} for key, one, other in rows]})
        return
    names = [str(file) for file in files]
    print(
        aligned([("", *names), *((key, as_text(one), as_text(other)) for key, one, other in rows)]) if rows else "equal"
    )


def as_text(value: Any) -> str:
    """A value in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else "–" if value is None else str(value)


def describe(facts: Mapping[str, Any]) -> str:
    """What `stretto plan` prints: the plan, a step's time and memory, and what was asked for beside them."""
    plan_rows = rows_of(facts["chosen"], facts["predicted"], facts["one_worker"])
    plan_rows[3:3] = place_rows(facts.get("places", ()))
    plan_rows[1:1] = stale_rows(facts["delays"])
    plan_rows += goodput_rows(facts["goodput"]) if "goodput" in facts else []
    if network := facts.get("network"):
        options = ", ".join(f"{key} {value}" for key, value in network["model_options"].items())
        plan_rows.append(("model", f"{network['model']}, {network['parameters']:,} parameters: {options}"))
    blocks: list[str | Sequence[Sequence[str]]] = [[*plan_rows, *passed_rows(facts["between_stages"])]]
    blocks += [f"doubtful: {doubt}" for doubt in facts["doubts"]]
    blocks += penalties.words_told(facts.get("words", {}))
    if "tried" in facts:
        blocks += ["", *plan_trials.describe(facts)]
    if facts["objective"]["goal"] == "loss":
        blocks += ["", *penalties.describe(facts["objective"], facts["penalties"])]
    if "explain" in facts:
        rows = [why(choice) for choice in facts["explain"]] or [("none", "", "", "")]
        blocks += ["", "one other choice at a time, by closed forms", rows]
    if "frontier" in facts:
        blocks += ["", "not beaten in time, memory, money and energy", frontier_rows(facts["frontier"])]
    if "roofline" in facts:
        blocks += ["", roofline.sentence(facts["roofline"])]
    if "scaling" in facts:
        from stretto.report import scaling  # it needs an extra

        blocks += ["", *scaling.describe(facts["scaling"])]
    if "command" in facts:
        given = ", with a rate in place of RATE" if facts["command"].endswith(f" {RATE}") else ""
        blocks += ["", f"{facts['command']}{given}{', or' if 'script' in facts else ''}"]
    if "script" in facts:
        processes = facts["chosen"]["workers"]
        placed = ", rank by rank on the workers above" if facts["chosen"].get("placement") else ""
        blocks += ["", f"torchrun --nproc-per-node {processes} your script{placed}, with", facts["script"]]
    searched = f"{facts['candidates']} candidates, {facts['priced']} priced, in {facts['search_seconds']:.2f} s"
    former = "" if facts["kept"] is None else f"; the former {facts['plan']} is kept as {facts['kept']}"
    blocks += ["", f"{searched}; written to {facts['plan']}{former}"]
    return "\n".join(block if isinstance(block, str) else aligned(block) for block in blocks)


def stale_rows(delays: Sequence[float]) -> list[tuple[str, str]]:
    """A row of how many updates old the gradients of a plan are, stage by stage; none where they are new."""
    if not any(delays):
        return []
    ages = [f"{delay:.3g}" for delay in (delays if len({*delays}) > 1 else delays[:1])]
    words = (
        f"{' '.join(ages)} updates old, stage by stage"
        if len(ages) > 1
        else f"{ages[0]} update{'s' * (delays[0] > 1)} old"
    )
    return [("stale gradients", f"{words}: the loss may fall more slowly")]


def compare_with_one(one: Mapping[str, Any] | None, chosen: Mapping[str, Any], seconds: float) -> str:
    """What a step takes on one worker, beside the plan's `seconds`."""
    if one is None:
        return "does not fit into its memory"
    if chosen["workers"] == 1:
        return "this plan"
    ratio = one["seconds"] / one["batch_size"] / (seconds / chosen["batch_size"])
    better = f"this plan is {ratio:.3g} times as fast" if ratio >= 1 else f"{1 / ratio:.3g} times as fast as this plan"
    batch = "" if one["batch_size"] == chosen["batch_size"] else f" of {one['batch_size']} examples"
    return f"{duration(one['seconds'])} a step{batch}: {better}"


def rows_of(
    chosen: Mapping[str, Any], predicted: Mapping[str, Any], one: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Rows of what was chosen and what a step takes, with the parts of its time."""
    axes = " x ".join(f"{axis} {chosen[axis]}" for axis in ("data", "pipeline", "tensor", "space"))
    seconds = predicted["seconds_per_step"]
    spread = f" ± {percent(predicted['spread'], 0)}" if "spread" in predicted else ""
    error = f", standard error {duration(predicted['standard_error'])}" if "standard_error" in predicted else ""
    return [
        ("method", chosen["method"]),
        ("axes", f"{axes} = {chosen['workers']} worker{'s' * (chosen['workers'] > 1)}"),
        ("stages begin at", " ".join(map(str, chosen["bounds"][:-1]))),
        ("sharding", chosen["sharding"]),
        ("batch size", str(chosen["batch_size"])),
        ("a step", f"{duration(seconds)}{spread} (by {predicted['by']}{error})"),
        *(
            # a bubble may be too short to be one
            (
                f"  {name.replace('_', ' ')}",
                "none" if name == "bubble" and value < RESOLUTION * seconds else duration(value),
            )
            for name, value in predicted["seconds"].items()
            if abs(value) > NEGLIGIBLE * seconds or (name == "bubble" and chosen["pipeline"] > 1)
        ),
        ("one worker", compare_with_one(one, chosen, seconds)),
        ("memory", f"{size(max(predicted['bytes_per_worker']))} on the fullest worker"),
        *expense_rows(predicted, chosen["batch_size"]),
    ]


def expense_rows(predicted: Mapping[str, Any], batch: int) -> list[tuple[str, str]]:
    """Rows of the money and the energy of a step, where the cluster's file has prices or powers."""
    money, joules = predicted.get("money_per_step"), predicted.get("joules_per_step")
    rows = [] if money is None else [("money", f"{number(money)} a step, {number(money / batch)} an example")]
    if joules is not None:
        rows.append(("energy", f"{energy(joules)} a step, {energy(joules / batch)} an example"))
    return rows


def place_rows(places: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A row for each worker of the pipeline: its stages, and which workers of the cluster hold them."""

    def listed(noun: str, numbers: Sequence[int]) -> str:
        return f"{noun}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"

    return [
        (
            "" if index else "placement",
            f"{listed('stage', each['stages'])} on {listed('worker', each['workers'])} ({', '.join(each['devices'])})",
        )
        for index, each in enumerate(places)
    ]


def passed_rows(passed: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """A row of what passes from stage to stage, where some stages pass several tensors: the model is no chain there."""
    if all(each["tensors"] == 1 for each in passed):
        return []
    words = [
        f"{each['tensors']} tensor{'s' if each['tensors'] > 1 else ''} of {size(each['bytes_per_example'])} an example"
        for each in passed
    ]
    return [("between stages", f"{', '.join(words)}: branches pass through the stages that they cross")]


def frontier_rows(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row of heads, and one about each plan of the frontier; money and energy only where they are known."""
    known = [key for key in ("money", "joules") if any(point[key] is not None for point in points)]
    costs = {"money": number, "joules": energy}
    heads = {"money": "money a step", "joules": "energy a step"}
    rows: list[tuple[str, ...]] = [("method", "workers", "a step", "memory", *(heads[key] for key in known))]
    for point in points:
        axes = describe_axes(point["data"], point["pipeline"], point["tensor"])
        method = ", ".join([point["method"], *axes, *([] if point["sharding"] == "none" else [point["sharding"]])])
        expenses = (costs[key](point[key]) for key in known)
        rows.append((method, str(point["workers"]), duration(point["seconds"]), size(point["bytes"]), *expenses))
    return rows


def why(other: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A row about another choice: its method, a step's time, and the part of it that changes most."""
    if not other["fits"]:
        return other["choice"], "does not fit", "", ""
    more = other["more_seconds"]
    changed = f"{other['term']} {'+' if more >= 0 else '-'}{duration(abs(more))}"
    return other["choice"], other["method"], f"{duration(other['seconds'])} ({other['times']:.3g} times)", changed


def reliability_of(settings: FailureSettings, cluster: Cluster) -> tuple[Reliability | None, list[str]]:
    """What is known of failures, None if too little, and what more it takes where some is known.

    Raises UsageError if an option is given and others that it needs are not.
    """
    try:
        interval = None if settings.checkpoint_interval == "auto" else float(settings.checkpoint_interval)
    except ValueError:
        raise UsageError(
            f"checkpoint_interval={settings.checkpoint_interval!r}: give seconds of work between two checkpoints, such "
            "as 600, or auto"
        ) from None
    known = Reliability(**asdict(settings) | {"checkpoint_interval": interval}).on(cluster)
    missing = known.missing(cluster)
    if not missing:
        return known, []
    if settings != FailureSettings():
        raise UsageError(f"goodput under failures needs more figures: give {needs(missing)}")
    return None, missing if "mtbf_hours" not in missing else []


def goodput_facts(plan: Plan, problem: Problem, known: Reliability) -> dict[str, Any]:
    """The goodput of a plan as plain data: None for an MTBF that is infinite."""
    facts = asdict(goodput_of(plan, problem, known))
    return facts | {"mtbf_seconds": None if math.isinf(facts["mtbf_seconds"]) else facts["mtbf_seconds"]}


def goodput_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of a plan's goodput, and of what it follows from."""
    steps, mtbf = facts["checkpoint_steps"], facts["mtbf_seconds"]
    fails, every = "nothing fails", "no checkpoints"
    if mtbf is not None:
        fails = f"a failure every {spell(mtbf)}, {seconds(facts['restart_seconds'])} to restart"
    if steps is not None:
        every = (
            f"a checkpoint of {seconds(facts['checkpoint_seconds'])} every {spell(facts['interval_seconds'])} "
            f"({steps:,} step{'s' * (steps > 1)})"
        )
    share = percent(facts["share"], 3 if 0.9995 <= facts["share"] < 1 else 1)
    return [("goodput", f"{share} of the time is useful work"), ("", f"{fails}; {every}")]


def spell(value: float) -> str:
    """Seconds as text; days and years where they are many."""
    days = value / 86400
    return seconds(value) if days < 3 else f"{number(days)} days" if days < 1000 else f"{number(days / 365)} years"
