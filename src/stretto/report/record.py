"""Records of finished runs: plain data that the study writes and the report reads."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from stretto.errors import UsageError
from stretto.options.kinds import read_record

LEAST_FALL = 0.05  # of the train loss, below which a run is stuck: losses of a sample move by some per cent
STATUSES = ("finished", "diverged")
NUMBERS = (  # of a record
    "train_loss train_accuracy validation_loss validation_accuracy validation_bleu test_loss test_accuracy test_bleu "
    "metrics test_metrics total_flops serial_flops seconds seconds_per_step"
)
ANSWERS = 0.1  # of the first evaluation's errors: a run that has mended more has learned something
BY_STAGE = ("cosines", "local_losses", "probes", "filters", "filter_shape")  # of measurements


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Plain data that files hold as JSON."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any], place: str = "") -> Self:
        """Read what `to_json` wrote, at a `place` of a file. Unknown keys are ignored: newer files stay readable."""
        return read_record(cls, data, place or cls.__name__.lower())

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps(..., allow_nan=False)`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Point(Stored):
    """One evaluation during a run. Costs are what the run has spent up to here.

    Compute is in FLOP; `serial_flops` counts the examples of a batch and the workers of the schedule as parallel.
    `seconds` is the time its steps took by the clock: of an emulation, which runs every worker on one device,
    or of real processes. A point exists only where its
    losses are finite: a run that has diverged makes no more points. `joules` is the energy of those steps, where it
    was measured.
    """

    step: int
    examples: int
    total_flops: float
    serial_flops: float
    seconds: float
    train_loss: float
    validation_loss: float
    validation_accuracy: float | None = None
    validation_bleu: float | None = None
    train_accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)  # the user's, on the validation split
    joules: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self, f"the evaluation at step {self.step}")


@dataclass(frozen=True, kw_only=True)
class Observation(Stored):
    """Figures by stage, observed during a few minibatches from `step` on.

    `mismatch` is ||w_forward - w_backward|| / ||w||; `prediction_error` ||w_predicted - w_actual|| / ||w_actual||, and
    `unpredicted_error` the same without prediction; None where there is nothing to measure. Memory is in bytes, the
    most at any time. `stretto.trainer.weight_observer` has the exact definitions.
    """

    step: int
    mismatch: tuple[float | None, ...]
    prediction_error: tuple[float | None, ...]
    unpredicted_error: tuple[float | None, ...]
    weight_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_numbers(self, f"the observation at step {self.step}")


@dataclass(frozen=True, kw_only=True)
class Measurement(Stored):
    """Measurements of the loss after `step`, on fixed training examples; `stretto.analysis` has the definitions.

    `sharpness` is the largest eigenvalue of the Hessian; `noise_trace` estimates the trace of the covariance of an
    example's gradient, `gradient_square` the square of the true gradient's norm (it may be negative). By stage:
    `cosines` of the gradients that train it and backpropagation's, `local_losses` of heads, accuracies of linear
    `probes`. `filters` are pictures of the first layer's, bytes in hexadecimal, of `filter_shape` [channels, height,
    width]. None where it was not asked for, or is not finite.
    """

    step: int
    sharpness: float | None = None
    noise_trace: float | None = None
    gradient_square: float | None = None
    cosines: tuple[float | None, ...] | None = None
    local_losses: tuple[float | None, ...] | None = None
    probes: tuple[float | None, ...] | None = None
    filters: tuple[str, ...] | None = None
    filter_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        names = [entry.name for entry in fields(self) if entry.name != "filters"]
        _check_numbers(self, f"the measurement at step {self.step}", names)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps(..., allow_nan=False)`; without what was not asked for by stage."""
        return {key: value for key, value in asdict(self).items() if value is not None or key not in BY_STAGE}


@dataclass(frozen=True, kw_only=True)
class Record(Stored):
    """One run that has ended: its configuration, its evaluations, and its cost.

    `method` is spelled with its options as the user wrote it; `options` holds what the sweep varied (`lr`,
    `batch_size`, ...). The losses and accuracies are those of the model at the end of the run, None where a diverged
    run or a regression has none. BLEU, of translations only, goes from 0 to 100.
    """

    id: str
    method: str
    seed: int
    options: Mapping[str, Any]
    status: str
    diverged_at: int | None = None
    points: tuple[Point, ...] = ()
    observations: tuple[Observation, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    validation_bleu: float | None = None
    train_accuracy: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_bleu: float | None = None
    total_flops: float = 0.0
    serial_flops: float = 0.0
    seconds: float = 0.0
    seconds_per_step: float | None = None  # the median, once the pipeline is full
    device: str | None = None  # the first process's: "cpu", or an accelerator's product name
    threads: int | None = None  # of each process
    metrics: Mapping[str, float] = field(default_factory=dict)  # the user's, on the validation split at the end
    test_metrics: Mapping[str, float] = field(default_factory=dict)
    higher_is_better: tuple[str, ...] = ()  # of the metrics, those of which more is better
    energy_source: str = ""  # what measured the joules of its evaluations; empty if nothing did

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise UsageError(f"run {self.id!r}: status is {self.status!r}; write one of {', '.join(STATUSES)}")
        _check_numbers(self, f"run {self.id!r}", NUMBERS.split())
        steps = [point.step for point in self.points]
        if steps != sorted(steps):
            raise UsageError(f"run {self.id!r}: its evaluations are at steps {steps}; write them in order of step")

    @property
    def diverged(self) -> bool:
        """Whether the run was stopped because its loss left the range of numbers."""
        return self.status == "diverged"

    @property
    def learned_nothing(self) -> bool:
        """Whether a finished run is no better at its end than at its first evaluation: it is stuck.

        Neither its validation loss nor its train loss has fallen. A run that learned its training examples by heart has
        learned. So has a classifier whose loss has risen because it is too sure of itself: it is spared if it gives
        right answers to more than a tenth of what was wrong at first.
        """
        if self.diverged or self.validation_loss is None or len(self.points) < 2:
            return False
        first, accuracy = self.points[0], self.validation_accuracy
        if self.train_loss is not None and self.train_loss < first.train_loss * (1 - LEAST_FALL):
            return False
        began = first.validation_accuracy
        answers = accuracy is not None and began is not None and accuracy > began + ANSWERS * (1 - began)
        return self.validation_loss >= first.validation_loss and not answers

    @property
    def failed(self) -> bool:
        """Whether the run diverged or learned nothing: it then counts for nothing but what it reached on its way."""
        return self.diverged or self.learned_nothing

    @property
    def outcome(self) -> str:
        """How the run ended, in words."""
        if self.diverged:
            return "diverged" if self.diverged_at is None else f"diverged at step {self.diverged_at}"
        return "learned nothing" if self.learned_nothing else "finished"

    @property
    def metric_scores(self) -> dict[str, float]:
        """The user's metrics under their names, and those on the test split as test_<name>."""
        return {**self.metrics, **{f"test_{name}": value for name, value in self.test_metrics.items()}}

    @property
    def configuration(self) -> str:
        """The same text for runs that differ in nothing but the seed."""
        return json.dumps([self.method, dict(self.options)], sort_keys=True, default=str)

    @property
    def option_text(self) -> str:
        """The options as a reader wants them, e.g. `lr=0.1, batch_size=64`."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def methods(records: tuple[Record, ...]) -> tuple[str, ...]:
    """List the methods in the order in which they first appear: the order of every table and legend."""
    return tuple(dict.fromkeys(record.method for record in records))


def family(method: str) -> str:
    """Return the method's name without its options: `chunked` for `chunked(chunks=2)`."""
    return method.split("(", 1)[0].strip()


def _check_numbers(record: Any, what: str, names: Sequence[str] | None = None) -> None:
    """Refuse fields (all of them, or `names`) without finite numbers; None may be a default, or in a tuple."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        if (names is not None and entry.name not in names) or (value is None and entry.default is None):
            continue
        numbers = [(entry.name, value)]
        if isinstance(value, Mapping):
            numbers = list(value.items())
        elif isinstance(value, tuple):
            numbers = [(entry.name, each) for each in value if each is not None]
        for name, number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise UsageError(
                    f"{name} of {what} is {number!r}, which is no finite number; leave the value out (null) or mark "
                    "the run 'diverged'"
                )


@dataclass(frozen=True, kw_only=True)
class Heading(Stored):
    """The heading of a study.

    `name` is the name of its file; `source` the figure or table of the paper, `claim` what that claims; `size` and
    `part` say which size of the study, and which of its parts, were run.
    """

    title: str
    name: str
    source: str = ""
    claim: str = ""
    size: str = ""
    part: str = ""

    @property
    def text(self) -> str:
        """The title, followed by the part if the study has several."""
        return f"{self.title}: {self.part}" if self.part else self.title

    @property
    def folder(self) -> str:
        """The name of the study's folder: file, size and part joined by hyphens."""
        return "-".join(word for word in (self.name, self.size, self.part) if word)


def several_devices(records: Sequence[Record]) -> str:
    """A sentence for runs that were not all computed alike; empty for those that were."""
    told = [run for run in records if run.device is not None]
    places = Counter(f"{run.device}, {run.threads} thread{'' if run.threads == 1 else 's'}" for run in told)
    if len(places) < 2:
        return ""
    listed = "; ".join(f"{count} on {place}" for place, count in places.items())
    return f"Runs were not all computed alike: {listed}. Do not compare their seconds."
