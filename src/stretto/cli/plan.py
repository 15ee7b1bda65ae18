"""stretto plan: the best plan for a model and a cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import FLAG, aligned, print_json, write
from stretto.cli.penalties import in_words as penalties_in_words
from stretto.cli.penalties import methods_of, study_of, weighed
from stretto.cli.scaling import in_words as scaling_in_words
from stretto.cli.scaling import scaled
from stretto.words import NUMBER, OPTIONS, TEXTS, WHOLE, WHOLES, Option

if TYPE_CHECKING:
    from stretto.plan import Objective, Plan, Problem
    from stretto.plan.models import Costed
    from stretto.plan.price import Prices

OUT = Path("plan.toml")
KEEP = 4  # plans that are simulated
PAIR = Parameter(consume_multiple=True, negative="", converter=lambda _, tokens: tuple(Path(t.value) for t in tokens))


def plan(
    config: Path | None = None,
    /,
    *,
    workers: Annotated[int | None, WHOLE] = None,
    cluster: str | None = None,
    model: str = "mlp",
    model_options: Annotated[dict[str, Option] | None, OPTIONS] = None,
    data: str | None = None,
    data_options: Annotated[dict[str, Option] | None, OPTIONS] = None,
    optimizer: str = "auto",
    batch_size: Annotated[tuple[int, ...] | None, WHOLES] = None,
    dtype: str = "bfloat16",
    methods: Annotated[tuple[str, ...], TEXTS] = ("synchronous",),
    stages: Annotated[tuple[int, ...] | None, WHOLES] = None,
    microbatches: Annotated[tuple[int, ...] | None, WHOLES] = None,
    objective: str = "step",
    critical_batch: Annotated[float | None, NUMBER] = None,
    least_steps: Annotated[float | None, NUMBER] = None,
    penalties: Annotated[dict[str, Option] | None, OPTIONS] = None,
    measured: Path | None = None,
    loss: Annotated[float | None, NUMBER] = None,
    all_workers: Annotated[bool, FLAG] = False,
    explain: Annotated[bool, FLAG] = False,
    frontier: Annotated[bool, FLAG] = False,
    scale: Annotated[tuple[int, ...] | None, WHOLES] = None,
    per_worker: Annotated[bool, FLAG] = False,
    diff: Annotated[tuple[Path, ...] | None, PAIR] = None,
    export: str | None = None,
    out: Path = OUT,
    json: Annotated[bool, FLAG] = False,
    quiet: Annotated[bool, FLAG] = False,
) -> None:
    """Find the best plan for a model and a cluster: axes, stages, method, micro-batches, recomputation, sharding.

    stretto train --plan FILE runs it, stretto show --plan FILE draws it. Searches every combination, exactly under the
    closed forms of its prices; the best few are simulated.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win.
    workers
        Devices of the cluster that may be used, its first ones; all unless said otherwise. Fewer if that is better.
    cluster
        A cluster's name, or its file, which stretto calibrate writes.
    model
        Network that stretto train trains: mlp, cnn, transformer, ...; a published one: gpt3-175b, resnet152, ...; or a
        function without arguments that returns (module, example): package.module:function or path/to/file.py:function.
    model_options
        Its options: --model-options.width 256.
    data
        Data set of a built-in network; an embedded one that suits it unless said otherwise.
    data_options
        Its options.
    optimizer
        sgd, lars, adam, adamw, nadam or lamb; what suits the network unless said otherwise.
    batch_size
        Examples of a step; several to choose from: 64,128.
    dtype
        Of a published network's weights; with bfloat16 the optimizer keeps float32 copies.
    methods
        Methods to choose from: names, or synchronous, asynchronous, local, all. Synchronous ones, which are plain
        training, unless said otherwise, but all for --objective loss.
    stages
        Numbers of stages to choose from.
    microbatches
        Numbers of micro-batches to choose from.
    objective
        step (time an example), money, memory, or loss (time to a loss: needs --critical-batch, or --measured).
    critical_batch
        Examples: steps to a loss are least-steps x (1 + critical-batch / batch size) x penalty.
    least_steps
        Steps to the loss with an infinite batch; 1, or what --measured says.
    penalties
        How many times as many steps as backprop a method takes to a loss: --penalties.pb 1.2. Others are assumed.
    measured
        Folder of a finished study that `stretto compare` wrote: penalties of its methods with their error over seeds,
        and the critical batch where it has several batch sizes. Methods that it lacks are left out; those named in
        --methods are tried all the same, under an assumed penalty.
    loss
        Train loss to aim at, with --measured; the hardest that most of its methods reach unless said otherwise.
    all_workers
        Use all workers, even if fewer were better.
    explain
        Tell what every other choice would change.
    frontier
        List the plans that no other beats in time, memory and money.
    scale
        Numbers of workers, 1,10,100,1000,10000: throughput and efficiency of data-parallel, pipeline and hybrid plans
        on each, the cluster with as many more nodes as it takes; and utilisation against the batch size on --workers.
        Printed, and drawn into a page beside the plan.
    per_worker
        With --scale, the batch size is that of each worker and grows with their number.
    diff
        Compare two plans instead: --diff A.toml B.toml.
    export
        torch: write the schedule as torch.distributed.pipelining reads it, and split points, beside the plan.
    out
        File for the plan.
    json
        Print one JSON object on stdout, nothing else.
    quiet
        Say nothing.
    """
    if diff is not None:
        tell_difference(diff, json=json)
        return
    from stretto.config import DEFAULTS
    from stretto.cost.cluster_file import find_cluster
    from stretto.errors import UsageError
    from stretto.plan import Objective, Penalty, Problem, search
    from stretto.plan.clock import CLOCKS, clocks
    from stretto.plan.explain import misfit
    from stretto.plan.file import script
    from stretto.plan.models import costed
    from stretto.plan.refine import refined

    if cluster is None:
        raise UsageError("cluster is missing: give its name, or the file that stretto calibrate wrote")
    if export not in (None, "torch"):
        raise UsageError(f"export={export!r}: there is torch")
    machines = find_cluster(cluster)
    given = {name: Penalty(float(value), "given") for name, value in (penalties or {}).items()}
    seen = study_of(measured, objective, loss)
    aim = Objective(
        goal=objective,  # type: ignore[arg-type]
        critical_batch=critical_batch or (seen.critical_batch if seen else None),
        least_steps=least_steps or (seen.least_steps if seen else None) or 1.0,
        penalties=given,
        measured=seen.penalties if seen else {},
    )
    chosen = methods_of(methods, objective, given, seen)
    usual = DEFAULTS[model].data if model in DEFAULTS else "digits"
    found_costs = costed(
        model, model_options or {}, data or usual, data_options or {}, optimizer, dtype=dtype,
        heads=any(CLOCKS[name].family == "local" for name in clocks(chosen)),
    )  # fmt: skip
    problem = Problem(
        costs=found_costs.costs, cluster=machines, workers=workers or machines.num_workers,
        batch_sizes=batch_size or (found_costs.batch_size,), optimizer=found_costs.optimizer, methods=chosen,
        microbatches=microbatches, stages=stages, heads=found_costs.heads, sides=images(found_costs),
        masters=found_costs.costs.dtype == "bfloat16", all_workers=all_workers, shards=shards(found_costs),
    )  # fmt: skip
    found = search(problem, aim, keep=KEEP)
    if found.best is None:
        raise UsageError(misfit(problem))
    plans = found.plans if objective == "memory" else refined(found.plans, found.prices)
    known = written(plans[0], found.prices, aim, found_costs, out, export)
    told: dict[str, Any] = {
        "plan": str(out),
        "predicted_seconds": plans[0].seconds,
        "predicted_bytes": [round(each) for each in plans[0].bytes],
        "candidates": found.candidates,
        "priced": found.priced,
        "search_seconds": found.seconds,
        "chosen": known["plan"],
        "predicted": known["predicted"],
        "objective": known["objective"],
    }  # fmt: skip
    if found_costs.positions is not None:
        told["script"] = script(plans[0], known["plan"]["bounds"])
    if objective == "loss":
        told["penalties"] = weighed(problem, aim, seen)
    if explain:
        told["explain"] = explained(problem, aim, plans[0], found.prices)
    if frontier:
        told["frontier"] = points(problem, aim)
    if scale is not None:
        told["scaling"] = scaled(problem, model, scale, out.with_suffix(".html"), per_worker=per_worker)
    if json:
        print_json(told)
    elif not quiet:
        print(in_words(told))


def images(model: "Costed") -> tuple[int, ...] | None:
    """The sides of images, if there are any."""
    return model.sides if any(model.sides) else None


def shards(model: "Costed") -> tuple[str, ...]:
    """What may be sharded: what `stretto train` can do, of a model that it trains."""
    from stretto.plan.problem import SHARDS
    from stretto.sync.choice import CHOICES

    return SHARDS if model.trained is None or "fully-shard" in CHOICES else ("none",)


def written(
    best: "Plan", prices: "Prices", aim: "Objective", model: "Costed", out: Path, export: str | None
) -> dict[str, Any]:
    """Write the plan, and what others read of it."""
    import json

    from stretto.methods import method
    from stretto.plan.file import content, split_points, to_toml
    from stretto.schedule.export import to_csv

    known = content(best, prices, aim, model=model.name, trained=model.trained)
    known["plan"]["bounds"] = model.bounds(best.bounds)
    write(out, to_toml(known))
    if export is not None:
        c = best.candidate
        schedule, _ = method(str(c)).plan(c.stages, c.pipeline)
        write(out.with_suffix(".csv"), to_csv(schedule))
        points = split_points(best.bounds, model.layers)
        write(out.with_suffix(".split.json"), f"{json.dumps(points, indent=1)}\n")
    return known


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
    from stretto.plan.file import difference, read_plan

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
    from stretto.plan.explain import size
    from stretto.report.units import duration

    chosen, predicted = told["chosen"], told["predicted"]
    axes = " x ".join(f"{axis} {chosen[axis]}" for axis in ("data", "pipeline", "tensor", "space"))
    rows = [
        ("method", chosen["method"]),
        ("axes", f"{axes} = {chosen['workers']} workers"),
        ("stages begin at", " ".join(map(str, chosen["bounds"][:-1]))),
        ("sharding", chosen["sharding"]),
        ("batch size", str(chosen["batch_size"])),
        ("a step", f"{duration(predicted['seconds_per_step'])} (by {predicted['by']})"),
        *(
            (f"  {name.replace('_', ' ')}", duration(value))
            for name, value in predicted["seconds"].items()
            if abs(value) > 1e-9 * predicted["seconds_per_step"]
        ),
        ("memory", f"{size(max(predicted['bytes_per_worker']))} on the fullest worker"),
    ]
    lines = [aligned(rows)]
    if told["objective"]["goal"] == "loss":
        lines += ["", *penalties_in_words(told["objective"], told["penalties"])]
    if "explain" in told:
        lines += [
            "",
            "one other choice at a time, by closed forms",
            aligned([why(each) for each in told["explain"]] or [("none",)]),
        ]
    if "frontier" in told:
        table = [(p["method"], f"{p['workers']} workers", duration(p["seconds"]), size(p["bytes"]), shown(p["money"]))
                 for p in told["frontier"]]  # fmt: skip
        lines += ["", "not beaten in time, memory and money", aligned(table)]
    if "scaling" in told:
        lines += ["", scaling_in_words(told["scaling"])]
    if "script" in told:
        lines += ["", f"torchrun --nproc-per-node {chosen['workers']} your script, with", told["script"]]
    looked = f"{told['candidates']} candidates, {told['priced']} priced, in {told['search_seconds']:.2f} s"
    return "\n".join([*lines, "", f"{looked}; written to {told['plan']}"])


def why(each: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A row about another choice."""
    from stretto.report.units import duration

    if not each["fits"]:
        return each["choice"], "does not fit", "", ""
    more = each["more_seconds"]
    changed = f"{each['term']} {'+' if more >= 0 else '-'}{duration(abs(more))}"
    return each["choice"], each["method"], f"{duration(each['seconds'])} ({each['times']:.3g} times)", changed
