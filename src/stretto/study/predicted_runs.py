"""Predictions of a traced run: from the times of its own actions, or from the costs of its stages on a cluster."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stretto.cost import Cluster, ModelCosts, stage_times
from stretto.cost.head_costs import borrow, uses_in
from stretto.cost.layer_table import LayerCost
from stretto.cost.step_prediction import Pricer, Workers, predictions, silent, turn_seconds
from stretto.errors import UsageError
from stretto.measure import layer_costs
from stretto.nn.batch import inputs_of
from stretto.report.prediction import MEAN_TIMES, OWN_TIMES, RunPrediction
from stretto.report.recorded_run import RecordedRun, mean_durations, own_durations
from stretto.settings.runs import TrainSettings, known
from stretto.study.counted_heads import counted_head, counted_predictor
from stretto.study.model_costs import outputs, planned_optimizer
from stretto.study.prepare import Prepared, stages_of
from stretto.tracing import Recording, read_recordings
from stretto.tracing.run_phases import RunPhase, tracks

EXAMPLES = 2  # of the batch on which costs are counted


def recordings_of(folder: Path, run: TrainSettings) -> list[Recording]:
    """One recording for each worker of replica 0; none without a trace."""
    recordings = read_recordings(folder)
    return recordings if run.stage_workers is None else recordings[:: run.mesh.inside][: run.stage_workers]


def phases_of(prepared: Prepared, recordings: Sequence[Recording]) -> dict[str, list[RunPhase]]:
    """The phases of a traced run, those of replica 0, for a track of its trace."""
    return tracks(recordings, prepared.trainer.schedule, prepared.trainer.rules, full_turns(prepared))


def full_turns(prepared: Prepared) -> range:
    """The turns that follow the method's own schedule, not that of its synchronous phases."""
    phases = prepared.trainer.method.phases
    return range(phases.warmup, sys.maxsize if phases.finish is None else phases.finish)


def recorded_run(prepared: Prepared, recordings: Sequence[Recording]) -> RecordedRun:
    """A traced run as the report compares it with simulations."""
    settings, trainer = prepared.settings, prepared.trainer
    return RecordedRun(
        run=settings.id,
        method=settings.method,
        recordings=recordings,
        schedule=trainer.schedule,
        rules=trainer.rules,
        among=full_turns(prepared),
    )


def predict(prepared: Prepared, recorded: RecordedRun, cluster: Cluster | None = None) -> RunPrediction:
    """Predict from the run's own action times; on a cluster from costs alone. Raises UsageError without costs.

    Its own times are means over the steady state; without one, each action's own.
    """
    trainer = prepared.trainer
    schedule = trainer.schedule
    costs, heads = costs_of_stages(prepared)
    *stages, last, loss = costs.layers
    stages.append(last.then(loss))
    rows = [stage if head is None else stage.then(head) for stage, head in zip(stages, heads, strict=True)]
    share = known(prepared.settings.batch_size) / (schedule.per_turn * prepared.settings.data_parallel)
    versions = trainer.method.versions(schedule)
    from_times = RunPrediction(
        source=MEAN_TIMES if recorded.is_steady else OWN_TIMES,
        durations=mean_durations(recorded.training, schedule, recorded.steady)
        if recorded.is_steady
        else own_durations(recorded.training, schedule),
        weights=tuple(row.parameter_bytes * held for row, held in zip(rows, versions, strict=True)),
        activations=tuple(row.held.at(share) for row in rows),
    )
    return from_times if cluster is None else on_cluster(prepared, costs, heads, from_times, cluster)


def seconds_per_step(prepared: Prepared, cluster: Cluster) -> float:
    """The predicted seconds of a step in the long run on a cluster, from costs alone. Raises as `pricer_on`."""
    return turn_seconds(pricer_on(prepared, *costs_of_stages(prepared), cluster))


def predict_untrained(prepared: Prepared, cluster: Cluster) -> RunPrediction:
    """Predict a run that was not made, from what its stages cost on a cluster. Raises UsageError without costs."""
    nothing = RunPrediction(source="", durations=lambda _: 0)
    return on_cluster(prepared, *costs_of_stages(prepared), nothing, cluster)


def on_cluster(
    prepared: Prepared,
    costs: ModelCosts,
    heads: Sequence[LayerCost | None],
    from_times: RunPrediction,
    cluster: Cluster,
) -> RunPrediction:
    """Predict from costs: times of actions and messages on the cluster, the runtime's overhead included."""
    pricer = pricer_on(prepared, costs, heads, cluster)
    return replace(
        from_times,
        source=f"what its stages cost on the cluster {cluster.name!r}, without a run",
        durations=lambda action: round(1e9 * pricer.seconds(action)),
        network=pricer.workers.network(1e9),
        sizes=pricer.size,
    )


def pricer_on(prepared: Prepared, costs: ModelCosts, heads: Sequence[LayerCost | None], cluster: Cluster) -> Pricer:
    """The times of a run's actions and messages on the first workers of a cluster.

    Raises UsageError where a stage is shared by several processes, or the cluster has too few workers.
    """
    settings, trainer = prepared.settings, prepared.trainer
    schedule, placement = trainer.schedule, trainer.placement
    if settings.mesh.inside > 1:
        raise UsageError(
            f"tensor={settings.tensor}, space={settings.space}: what processes share inside stages is priced by "
            "stretto plan only; leave --cluster out"
        )
    costs = borrow(costs, uses_in(costs, bounds_of(costs), trainer.rules))
    share = known(settings.batch_size) / schedule.per_turn
    places = [placement.replicas_of(schedule.worker_of[stage]) for stage in range(schedule.num_stages)]
    times = stage_times(
        costs, bounds_of(costs), cluster, share, workers=places, heads=heads,
        optimizer=planned_optimizer(settings.optimizer), silent=silent(trainer.rules, schedule.num_stages),
        cures=trainer.method.step_cures(schedule),
        predictions=predictions(trainer.method, trainer.rules),
    )  # fmt: skip
    workers = Workers(cluster, tuple(tuple(placement.replicas_of(worker)) for worker in range(schedule.num_workers)))
    return Pricer(trainer.method, schedule, trainer.rules, workers, times, trainer.weight_bytes)


def costs_of_stages(prepared: Prepared) -> tuple[ModelCosts, list[LayerCost | None]]:
    """Costs of each stage, with those of the loss last; and of each stage's head with its loss, None without a head."""
    settings, model, heads = prepared.settings, prepared.model, prepared.trainer.heads
    x, y = prepared.dataset.train.first(EXAMPLES)
    x = inputs_of(x)
    stages = stages_of(settings, model, prepared.dataset.train.first(known(settings.batch_size))[0])
    features = outputs(stages, *x) if any(head is not None for head in heads) else []
    head_costs: list[LayerCost | None] = [None] * len(stages)
    for stage, head in enumerate(heads[: len(stages) - 1]):
        if head is not None and stage in prepared.trainer.rules.reach.predicted:
            labelled = prepared.trainer.rules.reach.labelled
            head_costs[stage] = counted_predictor(head, features[stage], y if labelled else None)
        elif head is not None:
            head_costs[stage] = counted_head(head, features[stage], model.loss, x, y)
    return layer_costs(stages, x, loss=model.loss, target=y), head_costs


def bounds_of(costs: ModelCosts) -> tuple[int, ...]:
    """Bounds that cut the rows into one stage each; the loss belongs to the last stage."""
    return (*range(len(costs.layers) - 1), len(costs.layers))
