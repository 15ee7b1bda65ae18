"""What observers saw of each method, in the runs of its best configuration: mismatch, prediction error, memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from stretto.report.record import Observation, Record
from stretto.report.summary import MethodSummary

ByStage = tuple[float | None, ...]


@dataclass(frozen=True)
class Observed:
    """One method. Figures by stage are those of the last observation of a run; memory is the most of any."""

    method: str
    over_steps: tuple[tuple[int, float], ...]  # step, mismatch: its mean over stages
    mismatch: ByStage
    prediction_error: ByStage
    unpredicted_error: ByStage
    weight_bytes: tuple[float, ...]
    activation_bytes: tuple[float, ...]

    @property
    def predicts(self) -> bool:
        """Whether some stage's forward sees predicted weights."""
        return any(value is not None for value in self.prediction_error)

    @property
    def gain(self) -> ByStage:
        """The error with prediction over that without; None where either is missing or 0."""
        pairs = zip(self.prediction_error, self.unpredicted_error, strict=True)
        return tuple(one / other if one and other else None for one, other in pairs)

    @property
    def matches(self) -> bool:
        """Whether every backward was seen to read exactly what its forward saw."""
        return not any(self.mismatch) and not any(value for _, value in self.over_steps)

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        """Weights and activations of each stage."""
        return tuple(sum(both) for both in zip(self.weight_bytes, self.activation_bytes, strict=True))

    @property
    def fullest(self) -> int:
        """The stage that holds most."""
        return self.stage_bytes.index(max(self.stage_bytes))


def observed(summaries: Sequence[MethodSummary], records: Sequence[Record]) -> tuple[Observed, ...]:
    """One entry for each method that was observed, from the runs of its best configuration, or any if all diverged."""
    found = []
    for summary in summaries:
        runs = summary.best_configuration or [record for record in records if record.method == summary.method]
        runs = [record for record in runs if record.observations]
        if runs:
            found.append(_observed(summary.method, runs))
    return tuple(found)


def _observed(method: str, runs: Sequence[Record]) -> Observed:
    every = [observation for run in runs for observation in run.observations]
    last = [run.observations[-1] for run in runs]
    means = {step: [_mean(each.mismatch) for each in every if each.step == step] for step in {e.step for e in every}}
    averages = [(step, _mean(values)) for step, values in sorted(means.items())]
    return Observed(
        method=method,
        over_steps=tuple((step, value) for step, value in averages if value is not None),
        mismatch=_by_stage(last, lambda each: each.mismatch),
        prediction_error=_by_stage(last, lambda each: each.prediction_error),
        unpredicted_error=_by_stage(last, lambda each: each.unpredicted_error),
        weight_bytes=tuple(map(max, zip(*(each.weight_bytes for each in every), strict=True))),
        activation_bytes=tuple(map(max, zip(*(each.activation_bytes for each in every), strict=True))),
    )


def _by_stage(observations: Sequence[Observation], figures: Callable[[Observation], ByStage]) -> ByStage:
    return tuple(_mean(values) for values in zip(*map(figures, observations), strict=True))


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None
