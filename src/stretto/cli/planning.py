"""What stretto plan does: its settings become a model with costs, this one a problem, which is searched."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stretto.cli.output import print_json, write, writing_to
from stretto.cli.plan_output import describe, goodput_facts, reliability_of, summarize, write_plan
from stretto.cost import Cluster
from stretto.cost.cluster_file import find_cluster
from stretto.cost.stage_prediction import Machine
from stretto.errors import UsageError
from stretto.models.published import is_planned_only
from stretto.optimizers import optimizer_of
from stretto.options.checks import one_of
from stretto.plan import Plan, Problem, search
from stretto.plan.explain import explain, frontier, misfit
from stretto.plan.planned_methods import names_of, planned
from stretto.plan.problem import RECOMPUTE, SHARDS, USUAL_SPACES, usual_tensors
from stretto.plan.programs import USUAL, ProgramTraits, program_named
from stretto.plan.refine import plainest, refined
from stretto.plan.trials import ROUNDS
from stretto.replicas.sync_options import CHOICES
from stretto.report import roofline
from stretto.settings.planning import EXPORTED, PAGE, SEQUENCE, FailureSettings, PlanOutput, PlanSettings
from stretto.settings.planning import LAYERS as LAYERS_ARE
from stretto.settings.runs import DEFAULTS, TrainSettings
from stretto.study import model_costs
from stretto.study.layer_measurements import BLOCKS, LAYERS, is_here, is_measurable, layers_key, with_measured_layers
from stretto.study.model_costs import Costed, CostRequest, TensorFormat
from stretto.study.penalties import (
    methods_of,
    objective_of,
    penalty_rows,
    study_of,
    with_findings,
    without_words,
    words_in,
)
from stretto.study.plan_trials import check_trials, find_measured, measure_plans
from stretto.system import fork_server
from stretto.system.destinations import check_file
from stretto.trainer.progress import progress

KEEP = 4  # plans that are simulated


def make_plan(settings: PlanSettings, failures: FailureSettings, output: PlanOutput) -> None:
    """Find the best plan, write it, and tell what was asked for."""
    assert settings.cluster is not None, "the command refuses this, without torch"
    if output.export not in (None, "torch"):
        raise UsageError(f"export={output.export!r}: there is torch")
    cluster = find_cluster(settings.cluster)
    if settings.machines is not None:
        cluster = cluster.on_machines(settings.machines, settings.workers, settings.link)
    elif settings.link is not None:
        raise UsageError(f"link={settings.link!r}: between which machines? Give --machines 2, say")
    check_trials(settings, cluster)
    for ending in (*(EXPORTED if output.export else ()), *((PAGE,) if output.scale is not None else ())):
        check_file(output.out.with_suffix(ending))
    if output.roofline is not None:
        check_file(output.roofline)
    reliability, wanted = reliability_of(failures, cluster)
    study = study_of(settings)
    objective = objective_of(settings, study)
    methods = methods_of(settings, objective, study)
    silent = output.json or output.quiet
    costed = costs_of(settings, without_words(methods), cluster)
    methods, words = words_in(settings, methods, costed.optimizer, settings.workers or cluster.num_workers)
    model, problem = measure(settings, costed, cluster, methods, silent=silent)
    objective = with_findings(settings, objective, problem, study)
    found = search(problem, objective, keep=KEEP)
    if found.best is None:
        raise UsageError(misfit(problem))
    prices = found.prices
    best, *_ = found.plans
    if settings.objective != "memory":
        best = plainest(refined(found.plans, prices)[0], objective, prices)
    if model.in_parts and best.candidate.microbatches * best.candidate.mesh.data > 1:
        raise UsageError(f"{model.in_parts}\nor plan for whole minibatches: --microbatches 1 --data-parallel 1")
    if settings.tries is None:
        trials = find_measured(settings, objective, model, prices, best)
    else:
        with progress("trials", ROUNDS, silent=silent) as bar:
            trials = measure_plans(settings, objective, model, prices, bar.reach)
    best = best if trials is None else trials.plan
    file = write_plan(best, prices, objective, model, output, None if trials is None else trials.measured)
    facts = summarize(best, found, objective, file, model, output.out) | ({} if trials is None else trials.facts)
    facts |= {"words": words} if words else {}
    if settings.objective == "loss":
        facts["penalties"] = penalty_rows(problem, objective, study)
    if reliability is not None:
        facts["goodput"] = goodput_facts(best, problem, reliability)
    if output.explain:
        facts["explain"] = explain(problem, objective, best, prices)
    if output.frontier:
        facts["frontier"] = frontier(problem, objective)
    if output.roofline is not None:
        facts["roofline"] = draw_roofline(output.roofline, best, model, problem)
    if output.scale is not None:
        from stretto.report.scaling import study_scaling  # it needs an extra

        page, per_worker = output.out.with_suffix(PAGE), output.per_worker
        with writing_to(page):
            facts["scaling"] = study_scaling(
                problem, settings.model, output.scale, page, per_worker=per_worker, known=reliability, wanted=wanted
            )
    if output.json:
        print_json(facts)
    elif not output.quiet:
        print(describe(facts))


def draw_roofline(file: Path, plan: Plan, model: Costed, problem: Problem) -> dict[str, Any]:
    """Draw the layers on the plan's first worker, for a micro-batch of its size; give what is drawn as plain data."""
    c, cluster = plan.candidate, problem.cluster
    workers = (*(c.placement or range(c.workers)),)
    machine = Machine(cluster.device(workers[0]), problem.costs.dtype, cluster.crowded(workers)[0])
    names = [
        f"{name} {layer.type}" if name.isdigit() else name
        for name, layer in zip(model.layers, problem.costs.layers, strict=False)
    ]
    title = f"{model.name} on {cluster.name}, a micro-batch of {c.examples:g}, {problem.costs.dtype}"
    drawn = roofline.Roofline.of(title, problem.costs, names, machine, c.examples)
    write(file, roofline.svg(drawn))
    return {"file": str(file), **drawn.facts()}


def costs_of(settings: PlanSettings, methods: Iterable[str], cluster: Cluster) -> Costed:
    """What the model costs, heads included if some method has any, and parts of it that workers may share."""
    model, options = settings.model, settings.model_options or {}
    usual = DEFAULTS[model].data if model in DEFAULTS and not is_planned_only(model, options) else None
    heads = {planned(name).head: None for name in names_of([*methods]) if planned(name).has_heads}
    if measures_on(cluster, settings):  # steps with heads are measured whatever the methods are
        heads |= {"auto": None}
    requested = TrainSettings(
        model=model,
        model_options=options,
        data=settings.data or usual,
        data_options=settings.data_options or {},
        loss=settings.loss,
        metric=settings.metric,
        optimizer=settings.optimizer,
    )
    asked = CostRequest(
        heads=tuple(heads),
        sharing=sharing_workers(settings, cluster),
        format=format_of(settings, cluster),
        selective="selective" in (settings.recompute or RECOMPUTE),
        sequence=settings.sequence_parallel != "no",
    )
    return model_costs.costed(requested, asked)


def format_of(settings: PlanSettings, cluster: Cluster) -> TensorFormat:
    """What tensors of a network without data are: unless said otherwise, what large networks are trained in there.

    That is bfloat16, else float16, else float32. Raises UsageError for a choice of any other network's.
    """
    shared = set.intersection(*({*device.peak} for device in cluster.devices.values()))
    usual = next((dtype for dtype in ("bfloat16", "float16") if dtype in shared), "float32")
    format = TensorFormat(settings.dtype or usual, settings.memory_format)
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


def sharing_workers(settings: PlanSettings, cluster: Cluster) -> tuple[int, ...]:
    """The numbers of workers that may share weights: those of one node."""
    workers = settings.workers or cluster.num_workers
    fitting = (parts for parts in usual_tensors(cluster) if workers % parts == 0)
    steps_on = cluster.num_workers  # of which steps are measured, whatever the choices are
    measured = (steps_on,) if measures_on(cluster, settings) and steps_on in usual_tensors(cluster) else ()
    return tuple(dict.fromkeys(parts for parts in (*(settings.tensor or fitting), *measured) if parts > 1))


def measures_on(cluster: Cluster, settings: PlanSettings) -> bool:
    """Whether a plan for the cluster measures models on this machine, those that it can."""
    return settings.layers != "counted" and is_here(cluster)


def measure(
    settings: PlanSettings, model: Costed, cluster: Cluster, methods: tuple[str, ...], *, silent: bool
) -> tuple[Costed, Problem]:
    """The model and its problem; with layers and whole steps measured where the cluster is this machine.

    Or as --layers says.
    """
    one_of("layers", settings.layers, LAYERS_ARE)
    measurable, anew = is_measurable(model, cluster), settings.layers == "measured"
    if anew and not measurable:
        raise UsageError(
            f"layers='measured': layers of {settings.model} are measured on the machine that stretto calibrate has "
            f"measured, and cluster {cluster.name!r} is another one or has unequal workers, or stretto train cannot "
            "train the model"
        )
    if not (measures_on(cluster, settings) and measurable):
        return model, problem_of(settings, model, cluster, methods)
    from stretto.study.whole_steps import STEPS, TOLD, with_measured_steps

    batch = max(settings.batch_size or (model.batch_size,))
    with progress("measuring layers", 1 + BLOCKS, silent=silent) as bar:
        file = LAYERS.beside(settings.cluster)
        model = with_measured_layers(model, cluster, batch, lambda _: bar.advance(1), file=file, anew=anew)
    problem = problem_of(settings, model, cluster, methods)
    assert model.trained is not None, "what can be measured can be trained"
    fork_server.prepare()
    key = layers_key(model, cluster, batch)
    with progress("measuring steps", TOLD, silent=silent) as bar:
        file = STEPS.beside(settings.cluster)
        return model, with_measured_steps(problem, model.trained, key, bar.reach, file=file, anew=anew)


def problem_of(settings: PlanSettings, model: Costed, cluster: Cluster, methods: tuple[str, ...]) -> Problem:
    """A model on a cluster: on all of it unless said otherwise, with the batch that suits the model."""
    has_images = any(layer.image_windows for layer in model.costs.layers)  # others gain nothing from cut images
    is_trained = model.trained is not None
    shardings = {"none", *CHOICES} if is_trained else {each.partition("(")[0] for each in SHARDS}
    begins = settings.begins
    return Problem(
        costs=model.costs, cluster=cluster, workers=settings.workers or cluster.num_workers,
        batch_sizes=settings.batch_size or (model.batch_size,), optimizer=model.optimizer,
        heads=model.heads["auto"].rows if "auto" in model.heads else None,
        named_heads=model.heads, no_heads=model.no_heads,
        sides=model.sides if has_images else None, masters=model.costs.dtype in ("bfloat16", "float16"),
        shards=settings.sharding or tuple(each for each in SHARDS if each.partition("(")[0] in shardings),
        methods=methods, microbatches=settings.microbatches, begins=begins,
        stages=(len(begins),) if begins and settings.stages is None else settings.stages,
        pipelines=settings.pipeline,
        data_parallels=settings.data_parallel, tensors=tensors_of(settings, model, cluster),
        tensor_costs=model.tensor_costs, form_costs=model.form_costs, recompute=recompute_of(settings, model),
        sequences=sequences_of(settings, model), spaces=settings.space or USUAL_SPACES,
        all_workers=settings.all_workers, trained=is_trained,
        weight_products=not is_trained, program=program_of(settings, model),
    )  # fmt: skip


def program_of(settings: PlanSettings, model: Costed) -> ProgramTraits:
    """The program that trains a network without data. Raises UsageError for one of any other network."""
    if settings.program is not None and model.trained is not None:
        raise UsageError(
            f"program={settings.program!r} of {settings.model}: stretto train trains it, and is priced as it is; "
            "leave it out"
        )
    return program_named(settings.program or USUAL)


def recompute_of(settings: PlanSettings, model: Costed) -> tuple[str, ...]:
    """What may be recomputed. Raises UsageError for selective recomputation alone of a model without marks for it."""
    chosen = settings.recompute or RECOMPUTE
    if set(chosen) == {"selective"} and "selective" in model.unformed:
        raise UsageError(
            f"recompute='selective' of {settings.model}: {model.unformed['selective']}; choose none or full instead"
        )
    return chosen


def sequences_of(settings: PlanSettings, model: Costed) -> tuple[bool, ...]:
    """Whether sequences may be divided. Raises UsageError where they have to be and cannot."""
    one_of("sequence_parallel", settings.sequence_parallel, SEQUENCE)
    if settings.sequence_parallel == "yes" and not any(sequence for _, sequence, _ in model.form_costs):
        reason = model.unformed.get("sequence", "no processes share weights: choose --tensor 2 or more")
        raise UsageError(f"sequence_parallel='yes' of {settings.model}: {reason}. Choose no or auto")
    return SEQUENCE[settings.sequence_parallel]


def tensors_of(settings: PlanSettings, model: Costed, cluster: Cluster) -> tuple[int, ...] | None:
    """The numbers of workers that may share weights: as named, else the usual ones as far as the model allows.

    Raises UsageError for one that was named and cannot share this model's weights.
    """
    for parts in settings.tensor or ():
        if parts in model.unshared:
            raise UsageError(f"tensor={parts}: {model.unshared[parts]}")
    if settings.tensor or not model.unshared:
        return settings.tensor
    if optimizer_of(model.optimizer).whole:
        return (1,)
    return tuple(parts for parts in usual_tensors(cluster) if parts not in model.unshared)
