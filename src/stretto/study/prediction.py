"""Predictions of a traced run: from the times of its own actions, or from the costs of its stages on a cluster."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from stretto.cost import Cluster, ModelCosts, stage_times
from stretto.cost.layer_table import LayerCost
from stretto.cost.step_prediction import Pricer, silent, turn_seconds
from stretto.cost.worker_places import Workers
from stretto.errors import UsageError
from stretto.heads import LocalLoss
from stretto.heads.solo import SharedReadout
from stretto.losses import Loss
from stretto.measure import layer_costs
from stretto.report.prediction import MEAN_TIMES, RunPrediction
from stretto.report.turns import mean_durations, turn_starts
from stretto.settings.runs import TrainSettings, known
from stretto.simulate import simulate
from stretto.simulate.network import no_bytes
from stretto.simulate.timeline_recordings import recordings as simulated_recordings
from stretto.stage.stage import Target, head_loss
from stretto.study.model_costs import outputs
from stretto.study.prepare import Prepared, prepare_trial, stages_of
from stretto.study.single_run import traced
from stretto.study.store import RUN, read_run
from stretto.tracing import Recording, read_recordings
from stretto.tracing.overlay import between, overlay

EXAMPLES = 2  # of the batch on which costs are counted
MOST_TURNS = 200  # of an overlay


@dataclass(frozen=True, kw_only=True)
class Overlaid:
    """The steps of an overlay, from `first` on, and the seconds of a step: measured (median) and simulated (mean)."""

    method: str
    source: str
    first: int
    steps: int
    measured: float
    simulated: float


def recordings_of(folder: Path, run: TrainSettings) -> list[Recording]:
    """One recording for each worker of replica 0; none without a trace."""
    recordings = read_recordings(folder)
    return recordings if run.stage_workers is None else recordings[:: run.mesh.inside][: run.stage_workers]


def full_turns(prepared: Prepared) -> range:
    """The turns that follow the method's own schedule, not that of its synchronous phases."""
    phases = prepared.trainer.method.phases
    return range(phases.warmup, sys.maxsize if phases.finish is None else phases.finish)


def predict(prepared: Prepared, recordings: Sequence[Recording], cluster: Cluster | None = None) -> RunPrediction:
    """Predict from the run's own action times; on a cluster from costs alone. Raises UsageError without costs."""
    trainer = prepared.trainer
    schedule = trainer.schedule
    costs, heads = costs_of_stages(prepared)
    rows = [stage if head is None else stage.then(head) for stage, head in zip(stages_in(costs), heads, strict=True)]
    share = known(prepared.settings.batch_size) / (schedule.per_turn * prepared.settings.data_parallel)
    versions = trainer.method.versions(schedule)
    from_times = RunPrediction(
        source=MEAN_TIMES,
        durations=mean_durations(recordings, schedule, full_turns(prepared)[schedule.drain + 1 :]),
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
    times = stage_times(
        costs, bounds_of(costs), cluster, known(settings.batch_size) / schedule.per_turn,
        workers=[placement.replicas_of(schedule.worker_of[stage]) for stage in range(schedule.num_stages)],
        heads=heads, optimizer=settings.optimizer,
        silent=silent(trainer.rules, schedule.num_stages),
    )  # fmt: skip
    readouts = (head for head in trainer.heads if isinstance(head, SharedReadout))
    read = max((sum(p.numel() * p.element_size() for p in head.parameters()) for head in readouts), default=0)
    workers = Workers(cluster, tuple(tuple(placement.replicas_of(worker)) for worker in range(schedule.num_workers)))
    tied = {(tie.owner, tie.user): float(read) for tie in trainer.rules.ties if not tie.shares}
    return Pricer(trainer.method, schedule, trainer.rules, workers, times, tied | costs.tied(bounds_of(costs)))


def overlaid(folder: Path, cluster: Cluster | None = None) -> tuple[list[Recording], Overlaid]:
    """Recordings of a traced run and of its simulation, from the same turn of a full pipeline on, for one trace.

    Raises UsageError for a run without a trace, or one whose pipeline was never full.
    """
    if not (folder / RUN).is_file():
        raise UsageError(f"no run in {folder}: name a folder that stretto train --trace has written")
    run = TrainSettings.from_json(read_run(folder)[0]["settings"], str(folder))
    traced(folder)
    recordings, prepared = recordings_of(folder, run), prepare_trial(run)
    trainer = prepared.trainer
    schedule, full = trainer.schedule, trainer.schedule.drain + 1
    starts = turn_starts(recordings[0], schedule)
    steady = [turn for turn in sorted(starts) if turn in full_turns(prepared)[full:] and turn + 1 in starts]
    if not steady:
        raise UsageError(
            f"the run in {folder} has no turn of a full pipeline in its trace, which takes {full + 2} steps: train "
            "longer"
        )
    first, turns = steady[0], min(MOST_TURNS, len(steady))
    prediction = predict(prepared, recordings, cluster)
    timeline = simulate(
        schedule, trainer.rules, 2 * full + turns + full, prediction.durations, network=prediction.network,
        sizes=prediction.sizes or no_bytes,
    )  # fmt: skip
    simulation = simulated_recordings(timeline, trainer.rules, unit=1)
    simulated_starts, begin = turn_starts(simulation[0], schedule), 2 * full
    measured = between(recordings, starts[first], starts[first + turns])
    until = simulated_starts[begin + turns]
    simulated = between(simulation, simulated_starts[begin], until, (first - begin) * schedule.per_turn)
    steps = Overlaid(
        method=run.method, source=prediction.source, first=first + 1, steps=turns,
        measured=median(starts[turn + 1] - starts[turn] for turn in steady[:turns]) / 1e9,  # some hold an evaluation
        simulated=(until - simulated_starts[begin]) / turns / 1e9,
    )  # fmt: skip
    return overlay(measured, simulated), steps


def costs_of_stages(prepared: Prepared) -> tuple[ModelCosts, list[LayerCost | None]]:
    """Costs of each stage, with those of the loss last; and of each stage's head with its loss, None without a head."""
    settings, model, heads = prepared.settings, prepared.model, prepared.trainer.heads
    x, y = prepared.dataset.train.first(EXAMPLES)
    stages = stages_of(settings, model, prepared.dataset.train.first(known(settings.batch_size))[0])
    features = outputs(stages, x) if any(head is not None for head in heads) else []
    head_costs: list[LayerCost | None] = [None] * len(stages)
    for stage, head in enumerate(heads[: len(stages) - 1]):
        if isinstance(head, LocalLoss):
            head_costs[stage] = layer_costs([HeadWithLoss(head, model.loss, x, y)], features[stage]).layers[0]
        elif head is not None:
            row, loss = layer_costs([head], features[stage], loss=model.loss, target=y).layers
            head_costs[stage] = row.then(loss)
    return layer_costs(stages, x, loss=model.loss, target=y), head_costs


class HeadWithLoss(nn.Module):
    """A head that computes its own loss, as one layer, so that its costs can be counted."""

    inputs: Tensor
    target: Tensor

    def __init__(self, head: LocalLoss, loss: Loss, inputs: Tensor, target: Tensor) -> None:
        super().__init__()
        self.head, self.loss = head, loss
        self.register_buffer("inputs", inputs)
        self.register_buffer("target", target)

    def forward(self, *features: Tensor) -> Tensor:
        """The loss of the features' examples; inputs and targets are repeated to as many."""
        copies = len(features[0]) // len(self.inputs), len(features[0]) // len(self.target)
        inputs, target = torch.cat([self.inputs] * copies[0]), torch.cat([self.target] * copies[1])
        return head_loss(self.loss, self.head, features, features, Target(target, inputs=(inputs,)))


def bounds_of(costs: ModelCosts) -> tuple[int, ...]:
    """Bounds that cut the rows into one stage each; the loss belongs to the last stage."""
    return (*range(len(costs.layers) - 1), len(costs.layers))


def stages_in(costs: ModelCosts) -> list[LayerCost]:
    """The costs of each stage, with the loss as part of the last one."""
    *rows, loss = costs.layers
    return [*rows[:-1], rows[-1].then(loss)]
