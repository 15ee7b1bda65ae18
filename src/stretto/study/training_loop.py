"""The steps of a run, and what stands between them: evaluations, measurements, checkpoints, events."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from stretto.data import forever
from stretto.measure import Costs
from stretto.measure.energy import EnergyMeter
from stretto.nn.seeding import derive
from stretto.options.import_object import is_model_folder
from stretto.processes.stop_request import StopRequest
from stretto.settings.runs import known
from stretto.study.checkpoints import Checkpoints
from stretto.study.evaluation import evaluate, evaluation_steps, final_scores, scores_of
from stretto.study.measurements import Bleu, Measurer, ObservationWindows
from stretto.study.operation_profile import OperationProfile, profiled_steps
from stretto.study.prepare import Prepared, metrics_of
from stretto.study.run_progress import Progress
from stretto.study.store import RunWriter
from stretto.tracing import Recording
from stretto.trainer.tracking import Tracking

OnStep = Callable[[int, float | None], None]  # (steps done, latest known training loss)


def training_batches(prepared: Prepared, start: int = 0) -> Iterator[tuple[Any, Any]]:
    """The endless minibatches of a run, in its order, from step `start` on."""
    settings = prepared.settings
    seed = derive(settings.seed, "batches")
    return forever(prepared.dataset.train, known(settings.batch_size), seed, start=start)


class TrainingLoop:
    """Trains a prepared run from where its progress is, and keeps that up to date.

    Into `recordings`, if there are any, go the operations of some steps.
    """

    def __init__(
        self,
        prepared: Prepared,
        costs: Costs,
        progress: Progress,
        checkpoints: Checkpoints,
        request: StopRequest | None,
        writer: RunWriter,
        tracking: Tracking,
        recordings: Sequence[Recording] | None = None,
    ) -> None:
        self._prepared, self._costs, self._progress = prepared, costs, progress
        self._checkpoints, self._request, self._writer, self._tracking = checkpoints, request, writer, tracking
        settings, self._trainer = prepared.settings, prepared.trainer
        self._steps, self._batch_size = known(settings.steps), known(settings.batch_size)
        self._evaluated = evaluation_steps(self._steps, known(settings.evaluations))
        observed = self._trainer.processes == 1 and not is_model_folder(settings.model)  # it takes copies of all stages
        self._windows = ObservationWindows(self._trainer, self._steps) if observed else None
        self._measurer, self._bleu = Measurer(prepared, self._evaluated), Bleu(prepared)
        self._metrics = metrics_of(settings)
        self._meter = progress.meter or EnergyMeter(())
        ramp = self._trainer.schedule.drain + 1
        profiled = range(0) if recordings is None else profiled_steps(progress.steps, self._steps, ramp)
        self._profile = OperationProfile(self._trainer, recordings or (), profiled)

    def run(self, on_step: OnStep) -> None:
        """Train until all steps are made or a loss is not finite.

        Raises KeyboardInterrupt, having saved, once a process has been asked to stop.
        """
        progress = self._progress
        done = progress.steps
        batches = training_batches(self._prepared, done)
        self._meter.start()
        for step, (x, y) in zip(range(done + 1, self._steps + 1), batches, strict=False):
            with self._profile.around(step):
                loss = self._step(step, x, y)
            on_step(step, loss)
            if loss is not None and not math.isfinite(loss):
                progress.diverged_at = step
                return
            self._observe(step)
            if step in self._evaluated and not self._evaluate(step):
                progress.diverged_at = step
                return
            self._save_or_stop(step)
        progress.final = final_scores(self._prepared, progress.points[-1], self._bleu, self._metrics)

    def _step(self, step: int, x: Any, y: Any) -> float | None:
        # One step, timed; returns the loss that is known now, which may be that of an earlier step.
        before = time.perf_counter()
        if self._windows is not None:
            self._windows.before(step)
        loss = self._trainer.step(x, y)
        flushed = self._trainer.flush() if step == self._steps or self._checkpoints.due(step) else []
        seconds = time.perf_counter() - before
        self._progress.step_seconds.append(seconds)
        self._meter.tick()
        self._tracking.step(step, self._batch_size / seconds)
        if loss is not None:
            self._tracking.loss(step - self._trainer.lag, loss)
        self._tracking.last_losses(step, flushed)
        return loss

    def _observe(self, step: int) -> None:
        observation = None if self._windows is None else self._windows.after(step)
        if observation is not None:
            self._progress.observations.append(observation)
            self._writer.event("observation", **observation.to_json())

    def _evaluate(self, step: int) -> bool:
        # Whether the losses are finite.
        progress, writer = self._progress, self._writer
        with self._meter.paused(), self._trainer.pausing("evaluation"):
            seconds = sum(progress.step_seconds)
            point = evaluate(self._prepared, self._costs, step, seconds, self._bleu, self._metrics)
            if point is None:
                return False
            point = replace(point, joules=progress.joules)
            progress.points.append(point)
            writer.event("evaluation", **point.to_json())
            writer.worker_event("evaluation", step=step, seconds=point.seconds)
            self._tracking.evaluation(step, scores_of(point))
            measurement = self._measurer.measure(step)
        if measurement is not None:
            progress.measurements.append(measurement)
            writer.event("measurement", **measurement.to_json())
        return True

    def _save_or_stop(self, step: int) -> None:
        # After the last step there is nothing to save, and nothing to stop.
        trainer, request = self._trainer, self._request
        stops = request is not None and trainer.backend.should_stop(trainer.entered, trainer.lag, request.received)
        stops = stops and step < self._steps
        if stops or (self._checkpoints.due(step) and step < self._steps):
            with self._meter.paused():
                self._tracking.last_losses(step, self._trainer.flush())  # saving would, and drop them
                self._tracking.settle()
                self._progress.tracker_ids = self._tracking.for_checkpoint()
                path = self._checkpoints.save(self._trainer, self._progress.steps, self._progress.to_json())
            self._writer.worker_event("checkpoint", step=step, path=str(path))
        if stops:
            raise KeyboardInterrupt(f"stopped after step {step}, which is saved")
