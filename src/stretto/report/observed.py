"""Mismatch, prediction error and memory of each method, averaged over the runs of its best configuration."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from stretto.report.record import Observation, Record
from stretto.report.summary import MethodSummary

ByStage = tuple[float | None, ...]


@dataclass(frozen=True)
class ObservedMethod:
    """Figures of one method by stage: errors from the last observation of its runs, bytes the most of any."""

    method: str
    over_steps: tuple[tuple[int, float], ...]  # step, mismatch: its mean over stages
    mismatch: ByStage
    prediction_error: ByStage
    unpredicted_error: ByStage
    weight_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    @property
    def predicts(self) -> bool:
        """Whether the forward of some stage sees predicted weights."""
        return any(value is not None for value in self.prediction_error)

    @property
    def gain(self) -> ByStage:
        """The error with prediction / the error without, by stage; None where either is missing or 0."""
        pairs = zip(self.prediction_error, self.unpredicted_error, strict=True)
        return tuple(error / unpredicted if error and unpredicted else None for error, unpredicted in pairs)

    @property
    def matches(self) -> bool:
        """Whether every observed backward read exactly the weights that its forward saw."""
        return not any(self.mismatch) and not any(value for _, value in self.over_steps)

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        """Bytes of weights and activations together, by stage."""
        return tuple(sum(both) for both in zip(self.weight_bytes, self.activation_bytes, strict=True))

    @property
    def fullest(self) -> int:
        """The stage that holds the most bytes."""
        return self.stage_bytes.index(max(self.stage_bytes))


def observed_methods(summaries: Sequence[MethodSummary], records: Sequence[Record]) -> tuple[ObservedMethod, ...]:
    """One entry for each observed method, from its best configuration, or from all its runs if every run diverged."""
    methods = []
    for summary in summaries:
        runs = summary.best_configuration or [record for record in records if record.method == summary.method]
        runs = [record for record in runs if record.observations]
        if runs:
            methods.append(_averaged(summary.method, runs))
    return tuple(methods)


def _averaged(method: str, runs: Sequence[Record]) -> ObservedMethod:
    all_observations = [observation for run in runs for observation in run.observations]
    last = [run.observations[-1] for run in runs]
    by_step: dict[int, list[float | None]] = {}
    for observation in all_observations:
        by_step.setdefault(observation.step, []).append(_mean(observation.mismatch))
    averages = [(step, _mean(values)) for step, values in sorted(by_step.items())]
    return ObservedMethod(
        method=method,
        over_steps=tuple((step, value) for step, value in averages if value is not None),
        mismatch=_by_stage(last, lambda observation: observation.mismatch),
        prediction_error=_by_stage(last, lambda observation: observation.prediction_error),
        unpredicted_error=_by_stage(last, lambda observation: observation.unpredicted_error),
        weight_bytes=tuple(map(max, zip(*(seen.weight_bytes for seen in all_observations), strict=True))),
        activation_bytes=tuple(map(max, zip(*(seen.activation_bytes for seen in all_observations), strict=True))),
    )


def _by_stage(observations: Sequence[Observation], figures: Callable[[Observation], ByStage]) -> ByStage:
    return tuple(_mean(values) for values in zip(*map(figures, observations), strict=True))


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
