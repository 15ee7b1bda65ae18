"""stretto plan: the best plan for a model and a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli.failures import reliability_of, told
from stretto.cli.measured_plans import check_trials, tried_or_kept
from stretto.cli.output import print_json, progress, rising
from stretto.cli.penalty_options import methods_of, objective_of, penalty_rows, study_of, with_findings
from stretto.cli.plan_output import explained, in_words, points, summary, tell_difference, written
from stretto.cli.scaling import scaled
from stretto.errors import UsageError
from stretto.files.destinations import check_file
from stretto.options.checks import one_of
from stretto.settings.planning import EXPORTED, LAYERS, PAGE, SEQUENCE, FailureSettings, PlanOutput, PlanSettings

if TYPE_CHECKING:
    from stretto.cost import Cluster
    from stretto.plan import Found, Objective, Plan, Problem
    from stretto.plan.programs import ProgramTraits
    from stretto.study.model_costs import Costed
    from stretto.study.tensor_format import TensorFormat

KEEP = 4  # plans that are simulated


def plan(
    config: Path | None = None,
    /,
    *,
    settings: Annotated[PlanSettings, Parameter(name="*")] = PlanSettings(),  # noqa: B008 - frozen
    failures: Annotated[FailureSettings, Parameter(name="*")] = FailureSettings(),  # noqa: B008 - frozen
    output: Annotated[PlanOutput, Parameter(name="*")] = PlanOutput(),  # noqa: B008 - frozen
) -> None:
    """Find the best plan for a model and a cluster: axes, stages, method, micro-batches, recomputation, sharding.

    stretto train --plan FILE runs it, stretto show --plan FILE draws it. Searches every combination, exactly under the
    closed forms of its prices; the best few are simulated.

    Parameters
    ----------
    config
        TOML file with any of the options below; those on the command line win.
    """
    if output.diff is not None:
        tell_difference(output.diff, json=output.json)
        return
    from stretto.cost.cluster_file import find_cluster
    from stretto.plan import search
    from stretto.plan.explain import misfit
    from stretto.plan.refine import refined

    if settings.cluster is None:
        raise UsageError("cluster is missing: give its name, or the file that stretto calibrate wrote")
    if output.export not in (None, "torch"):
        raise UsageError(f"export={output.export!r}: there is torch")
    cluster = find_cluster(settings.cluster)
    check_trials(settings, cluster)
    check_beside(output)
    known, wanted = reliability_of(failures, cluster)
    study = study_of(settings)
    objective = objective_of(settings, study)
    methods = methods_of(settings, objective, study)
    model = costs_of(settings, methods, cluster)
    silent = output.json or output.quiet
    model = with_layers(model, settings, cluster, silent=silent)
    problem = with_steps(problem_of(settings, model, cluster, methods), model, settings, silent=silent)
    objective = with_findings(settings, objective, problem, study)
    found = search(problem, objective, keep=KEEP)
    if found.best is None:
        raise UsageError(misfit(problem))
    best, *_ = found.plans if settings.objective == "memory" else refined(found.plans, found.prices)
    trials = tried_or_kept(settings, problem, objective, model, best, found.prices, silent=silent)
    best = best if trials is None else trials.plan
    measured = None if trials is None else trials.measured
    file = written(best, found.prices, objective, model, output.out, output.export, measured)
    facts = summary(best, found, file, model, output.out) | ({} if trials is None else trials.facts)
    if settings.objective == "loss":
        facts["penalties"] = penalty_rows(problem, objective, study)
    if known is not None:
        facts["goodput"] = told(best, problem, known)
    facts |= asked_beside(output, problem, objective, best, found)
    if output.scale is not None:
        page = output.out.with_suffix(PAGE)
        facts["scaling"] = scaled(
            problem, settings.model, output.scale, page, per_worker=output.per_worker, known=known, wanted=wanted
        )
    if output.json:
        print_json(facts)
    elif not output.quiet:
        print(in_words(facts))


def check_beside(output: PlanOutput) -> None:
    """Raise UsageError where a file beside the plan cannot be written."""
    for ending in (*(EXPORTED if output.export else ()), *((PAGE,) if output.scale is not None else ())):
        check_file(output.out.with_suffix(ending))


def asked_beside(
    output: PlanOutput, problem: "Problem", objective: "Objective", best: "Plan", found: "Found"
) -> dict[str, Any]:
    """What was asked for beside the plan, as plain data: other choices, and the frontier."""
    facts: dict[str, Any] = {}
    if output.explain:
        facts["explain"] = explained(problem, objective, best, found.prices)
    if output.frontier:
        facts["frontier"] = points(problem, objective)
    return facts


def costs_of(settings: PlanSettings, methods: tuple[str, ...], cluster: "Cluster") -> "Costed":
    """What the model costs, heads included if some method has any, and parts of it that workers may share."""
    from stretto.models.published import is_planned_only
    from stretto.plan.planned_methods import names_of, planned
    from stretto.plan.problem import RECOMPUTE
    from stretto.settings.runs import DEFAULTS
    from stretto.study.model_costs import costed

    model, options = settings.model, settings.model_options or {}
    usual = DEFAULTS[model].data if model in DEFAULTS and not is_planned_only(model, options) else None
    heads = {planned(name).head: None for name in names_of(methods) if planned(name).family == "local"}
    if measures_on(cluster, settings):  # steps with heads are measured whatever the methods are
        heads |= {"auto": None}
    return costed(
        model, options, settings.data or usual, settings.data_options or {}, settings.optimizer,
        loss=settings.loss, metric=settings.metric, format=format_of(settings, cluster), heads=tuple(heads),
        sharing=sharing_workers(settings, cluster), selective="selective" in (settings.recompute or RECOMPUTE),
        sequence=settings.sequence_parallel != "no",
    )  # fmt: skip


def format_of(settings: PlanSettings, cluster: "Cluster") -> "TensorFormat":
    """What tensors of a network without data are. Raises UsageError for a choice of any other network's."""
    from stretto.models.published import is_planned_only
    from stretto.study.tensor_format import TensorFormat

    format = TensorFormat(settings.dtype or usual_dtype(cluster), settings.memory_format)
    if is_planned_only(settings.model, settings.model_options or {}):
        return format
    if settings.dtype is not None:
        raise UsageError(
            f"dtype={settings.dtype!r} of {settings.model}: a network with data, or of your own, is planned for in the "
            "types that its module has, as stretto train --precision float32 trains it; leave it out"
        )
    if format.memory_format != "contiguous":
        raise UsageError(
            f"memory_format={settings.memory_format!r} of {settings.model}: stretto train takes tensors as the module "
            "has them. Leave it out; in a file of your own call module.to(memory_format=torch.channels_last)"
        )
    return format


def usual_dtype(cluster: "Cluster") -> str:
    """What large networks are trained in, on devices that have it: bfloat16, else float16, else float32."""
    shared = set.intersection(*({*device.peak} for device in cluster.devices.values()))
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in shared), "float32")


def with_layers(model: "Costed", settings: PlanSettings, cluster: "Cluster", *, silent: bool) -> "Costed":
    """The model with its layers measured, where the cluster is this machine, or as --layers says."""
    from stretto.plan.beside_cluster import file_beside
    from stretto.study.layer_measurements import BLOCKS, is_measurable, with_measured_layers

    one_of("layers", settings.layers, LAYERS)
    measurable = is_measurable(model, cluster)
    if settings.layers == "measured" and not measurable:
        raise UsageError(
            f"layers='measured': layers of {settings.model} are measured on the machine that stretto calibrate has "
            f"measured, and cluster {cluster.name!r} is another one or has unequal workers, or stretto train cannot "
            "train the model"
        )
    if not (measures_on(cluster, settings) and measurable):
        return model
    batch = largest_batch(settings, model)
    with progress("measuring layers", 1 + BLOCKS, silent=silent) as bar:
        file, anew = file_beside(settings.cluster or "", ".layers.json"), settings.layers == "measured"
        return with_measured_layers(model, cluster, batch, lambda _: bar.advance(1), file=file, anew=anew)


def with_steps(problem: "Problem", model: "Costed", settings: PlanSettings, *, silent: bool) -> "Problem":
    """The problem with predictions corrected by whole steps, where the layers were measured, too."""
    from stretto.plan.beside_cluster import file_beside
    from stretto.processes import fork_server
    from stretto.study.layer_measurements import is_measurable, key_of
    from stretto.study.step_measurements import TOLD, with_measured_steps

    if not (measures_on(problem.cluster, settings) and is_measurable(model, problem.cluster)):
        return problem
    assert model.trained is not None, "what can be measured can be trained"
    fork_server.prepare()
    key = key_of(model, problem.cluster, largest_batch(settings, model))
    with progress("measuring steps", TOLD, silent=silent) as bar:
        file, anew = file_beside(settings.cluster or "", ".steps.json"), settings.layers == "measured"
        return with_measured_steps(problem, model.trained, key, rising(bar.advance, TOLD), file=file, anew=anew)


def measures_on(cluster: "Cluster", settings: PlanSettings) -> bool:
    """Whether a plan for the cluster measures models on this machine, those that it can."""
    from stretto.study.layer_measurements import is_here

    return settings.layers != "counted" and is_here(cluster)


def largest_batch(settings: PlanSettings, model: "Costed") -> int:
    """The largest batch that a plan may have, of which layers and steps are measured."""
    return max(settings.batch_size or (model.batch_size,))


def sharing_workers(settings: PlanSettings, cluster: "Cluster") -> tuple[int, ...]:
    """The numbers of workers that may share weights: those of one node."""
    from stretto.plan.problem import usual_tensors

    workers = settings.workers or cluster.num_workers
    fitting = (parts for parts in usual_tensors(cluster) if workers % parts == 0)
    steps_on = cluster.num_workers  # of which steps are measured, whatever the choices are
    measured = (steps_on,) if measures_on(cluster, settings) and steps_on in usual_tensors(cluster) else ()
    return tuple(dict.fromkeys(parts for parts in (*(settings.tensor or fitting), *measured) if parts > 1))


def problem_of(settings: PlanSettings, model: "Costed", cluster: "Cluster", methods: tuple[str, ...]) -> "Problem":
    """A model on a cluster: on all of it unless said otherwise, with the batch that suits the model."""
    from stretto.plan import Problem
    from stretto.plan.problem import USUAL_SPACES

    return Problem(
        costs=model.costs, cluster=cluster, workers=settings.workers or cluster.num_workers,
        batch_sizes=settings.batch_size or (model.batch_size,), optimizer=model.optimizer,
        heads=model.heads["auto"].rows if "auto" in model.heads else None,
        named_heads=model.heads, no_heads=model.no_heads,
        sides=images(model), masters=model.costs.dtype in ("bfloat16", "float16"),
        shards=settings.sharding or shards(model), methods=methods,
        microbatches=settings.microbatches, stages=stages_of(settings), begins=settings.begins,
        pipelines=settings.pipeline,
        data_parallels=settings.data_parallel, tensors=tensors_of(settings, model, cluster),
        tensor_costs=model.tensor_costs, form_costs=model.form_costs, recompute=recompute_of(settings, model),
        sequences=sequences_of(settings, model), spaces=settings.space or USUAL_SPACES,
        all_workers=settings.all_workers, trained=model.trained is not None,
        weight_products=model.trained is None, program=program_of(settings, model),
    )  # fmt: skip


def program_of(settings: PlanSettings, model: "Costed") -> "ProgramTraits":
    """The program that trains a network without data. Raises UsageError for one of any other network."""
    from stretto.plan.programs import USUAL, program_named

    if settings.program is not None and model.trained is not None:
        raise UsageError(
            f"program={settings.program!r} of {settings.model}: stretto train trains it, and is priced as it is; "
            "leave it out"
        )
    return program_named(settings.program or USUAL)


def stages_of(settings: PlanSettings) -> tuple[int, ...] | None:
    """The numbers of stages to choose from; as many as begin somewhere, where that is given."""
    return (len(settings.begins),) if settings.begins and settings.stages is None else settings.stages


def recompute_of(settings: PlanSettings, model: "Costed") -> tuple[str, ...]:
    """What may be recomputed. Raises UsageError for selective recomputation alone of a model without marks for it."""
    from stretto.plan.problem import RECOMPUTE

    chosen = settings.recompute or RECOMPUTE
    if set(chosen) == {"selective"} and "selective" in model.unformed:
        raise UsageError(
            f"recompute='selective' of {settings.model}: {model.unformed['selective']}; choose none or full instead"
        )
    return chosen


def sequences_of(settings: PlanSettings, model: "Costed") -> tuple[bool, ...]:
    """Whether sequences may be divided. Raises UsageError where they have to be and cannot."""
    one_of("sequence_parallel", settings.sequence_parallel, SEQUENCE)
    if settings.sequence_parallel == "yes" and not any(sequence for _, sequence, _ in model.form_costs):
        reason = model.unformed.get("sequence", "no processes share weights: choose --tensor 2 or more")
        raise UsageError(f"sequence_parallel='yes' of {settings.model}: {reason}. Choose no or auto")
    return SEQUENCE[settings.sequence_parallel]


def tensors_of(settings: PlanSettings, model: "Costed", cluster: "Cluster") -> tuple[int, ...] | None:
    """The numbers of workers that may share weights: those that were named, else the usual ones that can.

    Raises UsageError for one that was named and cannot share this model's weights.
    """
    from stretto.optimizers import optimizer_of
    from stretto.plan.problem import usual_tensors

    for parts in settings.tensor or ():
        if parts in model.unshared:
            raise UsageError(f"tensor={parts}: {model.unshared[parts]}")
    if settings.tensor or not model.unshared:
        return settings.tensor
    if optimizer_of(model.optimizer).whole:
        return (1,)
    return tuple(parts for parts in usual_tensors(cluster) if parts not in model.unshared)


def images(model: "Costed") -> tuple[int, ...] | None:
    """The sides of images, if some layer convolves or pools any; others gain nothing from cut images."""
    return model.sides if any(layer.image_windows for layer in model.costs.layers) else None


def shards(model: "Costed") -> tuple[str, ...]:
    """What may be sharded: what `stretto train` can do, of a model that it trains."""
    from stretto.plan.problem import SHARDS
    from stretto.replicas.sync_options import CHOICES

    trains = {"none", *CHOICES}
    return tuple(each for each in SHARDS if model.trained is None or each.partition("(")[0] in trains)
