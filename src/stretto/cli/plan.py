"""stretto plan: the best plan for a model and a cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.output import FLAG, print_json
from stretto.cli.penalties import aim_of, methods_of, study_of, weighed
from stretto.cli.planned import explained, in_words, points, summary, tell_difference, written
from stretto.cli.scaling import scaled
from stretto.settings.command_line import NUMBER, OPTIONS, TEXTS, WHOLE, WHOLES, Option

if TYPE_CHECKING:
    from stretto.cost import Cluster
    from stretto.plan import Problem
    from stretto.study.model_costs import Costed

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
    from stretto.cost.cluster_file import find_cluster
    from stretto.errors import UsageError
    from stretto.plan import search
    from stretto.plan.explain import misfit
    from stretto.plan.refine import refined

    if cluster is None:
        raise UsageError("cluster is missing: give its name, or the file that stretto calibrate wrote")
    if export not in (None, "torch"):
        raise UsageError(f"export={export!r}: there is torch")
    machines = find_cluster(cluster)
    seen = study_of(measured, objective, loss)
    aim = aim_of(objective, critical_batch, least_steps, penalties or {}, seen)
    chosen = methods_of(methods, objective, aim.penalties, seen)
    costs = costs_of(model, model_options or {}, data, data_options or {}, optimizer, dtype, chosen)
    problem = problem_of(
        costs, machines, workers, batch_size, methods=chosen, microbatches=microbatches, stages=stages,
        all_workers=all_workers,
    )  # fmt: skip
    found = search(problem, aim, keep=KEEP)
    if found.best is None:
        raise UsageError(misfit(problem))
    best, *_ = found.plans if objective == "memory" else refined(found.plans, found.prices)
    told = summary(best, found, written(best, found.prices, aim, costs, out, export), costs, out)
    if objective == "loss":
        told["penalties"] = weighed(problem, aim, seen)
    if explain:
        told["explain"] = explained(problem, aim, best, found.prices)
    if frontier:
        told["frontier"] = points(problem, aim)
    if scale is not None:
        told["scaling"] = scaled(problem, model, scale, out.with_suffix(".html"), per_worker=per_worker)
    if json:
        print_json(told)
    elif not quiet:
        print(in_words(told))


def costs_of(
    model: str, model_options: Mapping[str, Any], data: str | None, data_options: Mapping[str, Any], optimizer: str,
    dtype: str, methods: Sequence[str],
) -> "Costed":  # fmt: skip
    """What a model costs, heads included if some method has any."""
    from stretto.plan.planned_methods import names_of, planned
    from stretto.settings.runs import DEFAULTS
    from stretto.study.model_costs import costed

    usual = DEFAULTS[model].data if model in DEFAULTS else "digits"
    heads = any(planned(name).family == "local" for name in names_of(methods))
    return costed(model, model_options, data or usual, data_options, optimizer, dtype=dtype, heads=heads)


def problem_of(
    model: "Costed", cluster: "Cluster", workers: int | None, batch_sizes: tuple[int, ...] | None, **limits: Any
) -> "Problem":
    """A model on a cluster: on all of it unless said otherwise, with the batch that suits the model."""
    from stretto.plan import Problem

    return Problem(
        costs=model.costs, cluster=cluster, workers=workers or cluster.num_workers,
        batch_sizes=batch_sizes or (model.batch_size,), optimizer=model.optimizer, heads=model.heads,
        sides=images(model), masters=model.costs.dtype == "bfloat16", shards=shards(model), **limits,
    )  # fmt: skip


def images(model: "Costed") -> tuple[int, ...] | None:
    """The sides of images, if there are any."""
    return model.sides if any(model.sides) else None


def shards(model: "Costed") -> tuple[str, ...]:
    """What may be sharded: what `stretto train` can do, of a model that it trains."""
    from stretto.plan.problem import SHARDS
    from stretto.replicas.strategies import CHOICES

    return SHARDS if model.trained is None or "fully-shard" in CHOICES else ("none",)
