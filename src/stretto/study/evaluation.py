"""What a run is evaluated on, when, and what it comes to: losses, accuracies, the user's metrics, costs so far.

Measured beside, without disturbing it: `Bleu` translates at every evaluation, `ObservationWindows` observe the weights
that stages see, and `Measurer` takes what `--measure` asks for. `Bleu` and `Measurer` work on a copy of the weights,
gathered from all processes.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stretto.analysis.filters import filters
from stretto.analysis.gradient_cosine import alignment
from stretto.analysis.linear_probes import probes
from stretto.analysis.noise_scale import noise_scale
from stretto.analysis.sharpness import sharpness
from stretto.data import Dataset
from stretto.data.dataset import RowReader
from stretto.data.user_data import TensorSplit, UserData
from stretto.measure import Costs
from stretto.models.encoder_decoder import find_bleu, score
from stretto.nn.batch import to_device
from stretto.nn.input_errors import naming_rows
from stretto.report.record import Measurement, Observation, Point
from stretto.settings.runs import known
from stretto.study.checkpoints import Progress
from stretto.study.prepare import Prepared, prepare
from stretto.trainer.backend import in_one_process
from stretto.trainer.evaluate import Metric, refuse_undefined
from stretto.trainer.trainer import Trainer
from stretto.trainer.weight_observer import Observer

BLEU_EXAMPLES = 64  # validation examples that are translated at each evaluation; at the end the whole test split
WINDOWS = 8  # of observation in a run, at most
WINDOW_SPACING = 20  # steps from one window to the next, at least: in a window a step takes up to twice as long
WINDOW_MINIBATCHES = 2
MEASUREMENTS = 4  # in a run, evenly spread
SHARP_EXAMPLES = 512
NOISE_EXAMPLES, NOISE_BATCH = 1024, 8
COSINE_EXAMPLES = 512
PROBE_EXAMPLES = 512  # targets to fit on, and as many to test on
ONE_PROCESS: dict[str, Any] = {
    "workers": None,
    "data_parallel": 1,
    "tensor": 1,
    "space": (1, 1),
    "sync": "all-reduce",
    "precision": "float32",
}


class ModelCopy:
    """A Trainer of the run's stages and heads in float32, on one process, which trains nothing."""

    def __init__(self, prepared: Prepared) -> None:
        self._settings = replace(prepared.settings, **ONE_PROCESS)
        self._trainer: Trainer | None = None  # built when it is first needed

    def load(self, weights: Mapping[str, Tensor]) -> Trainer:
        """Load the weights that `Trainer.gather` returned."""
        if self._trainer is None:
            with in_one_process():
                self._trainer = prepare(self._settings).trainer
        parts: dict[str, nn.Module | None] = {f"{n}.": stage for n, stage in enumerate(self._trainer.stages)}
        parts |= {f"heads.{n}.": head for n, head in enumerate(self._trainer.heads)}
        for prefix, module in parts.items():
            if module is not None:
                module.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
        return self._trainer


class Bleu:
    """BLEU of greedy translations, from 0 to 100; on several processes a collective of which the first one translates.

    Both functions return None where the task is no translation, and on all processes but the first.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._copy = ModelCopy(prepared)

    def validation(self) -> float | None:
        """BLEU on the first BLEU_EXAMPLES validation examples."""
        validation = self._prepared.dataset.validation
        return self._score(*validation.first(BLEU_EXAMPLES))

    def test(self) -> float | None:
        """BLEU on the test split."""
        test = self._prepared.dataset.test
        return None if test is None else self._score(*test.first(len(test)))

    def _score(self, x: Any, y: Any) -> float | None:
        text = self._prepared.dataset.text
        weights = None if text is None else self._prepared.trainer.gather()
        if text is None or weights is None:
            return None
        model, device = self._copy.load(weights).model, self._prepared.trainer.device
        return score(model, x.to(device), y.to(device), text, find_bleu())


class ObservationWindows:
    """Observes a run in a few windows of two minibatches, because an observer copies weights.

    Call `before` and `after` each step; some calls of `after` return an observation.
    """

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self._trainer = trainer
        self._steps = steps
        # without drain turns every minibatch is finished before the next one: all are alike
        self._minibatches = WINDOW_MINIBATCHES if trainer.schedule.drain else 1
        self._starts = window_starts(steps, trainer.schedule.drain)
        self._window: tuple[int, Observer] | None = None

    def before(self, step: int) -> None:
        """Open a window if one begins at this step and the last one is closed."""
        if self._window is None and step in self._starts:
            self._window = step, self._trainer.observe(self._minibatches)

    def after(self, step: int) -> Observation | None:
        """What a window observed, once its minibatches are finished or the run has ended."""
        if self._window is None or (self._window[1].watching and step < self._steps):
            return None
        (start, observer), self._window = self._window, None
        observer.stop()
        figures = observer.figures()
        return Observation(
            step=start,
            mismatch=finite(figures.mismatch),
            prediction_error=finite(figures.prediction_error),
            unpredicted_error=finite(figures.unpredicted_error),
            weight_bytes=figures.weight_bytes,
            activation_bytes=figures.activation_bytes,
        )


def window_starts(steps: int, drain: int) -> set[int]:
    """The steps at which windows open, closer together at the start, as evaluations are.

    The pipeline is full by then: after one drain every gradient is as old as it gets, after two so is every version.
    """
    first, last = min(2 * drain + 2, steps), steps - drain - WINDOW_MINIBATCHES + 1
    windows = min(WINDOWS, steps // WINDOW_SPACING)
    if last <= first or windows < 2:
        return {first}
    return {first + round((last - first) * (i / (windows - 1)) ** 2) for i in range(windows)}


class Measurer:
    """Measures what the settings' `measure` asks for, at some of the steps at which the run is evaluated.

    Examples are the same in every run. On several processes it is a collective; the first one measures.
    """

    def __init__(self, prepared: Prepared, evaluated: Set[int]) -> None:
        self._prepared = prepared
        self._wanted = prepared.settings.measure or ()
        steps = known(prepared.settings.steps)
        goals = [steps * (time + 1) / MEASUREMENTS for time in range(MEASUREMENTS)]
        self._steps = {min(evaluated, key=lambda step: abs(step - goal)) for goal in goals} if self._wanted else set()
        self._copy = ModelCopy(prepared)

    def measure(self, step: int) -> Measurement | None:
        """The measurements after a step; None if nothing is measured at this step."""
        if step not in self._steps:
            return None
        weights = self._prepared.trainer.gather()
        return Measurement(step=step, **({} if weights is None else self._fields(self._copy.load(weights))))

    def _fields(self, copy: Trainer) -> dict[str, Any]:
        """The fields of a `Measurement` that are asked for."""
        dataset, loss, device = self._prepared.dataset, self._prepared.model.loss, self._prepared.trainer.device
        model, train, fields = copy.model, dataset.train, dict[str, Any]()
        if "sharpness" in self._wanted:
            batches = [on(device, *batch) for batch in sample(train, SHARP_EXAMPLES).batches(SHARP_EXAMPLES)]
            (fields["sharpness"],) = finite((sharpness(model, loss, batches).value,))
        if "noise" in self._wanted:
            pairs = sample(train, NOISE_EXAMPLES).batches(min(NOISE_BATCH, len(train) // 2), drop_last=True)
            noise = noise_scale(model, loss, (on(device, x, y) for x, y in pairs))
            fields["noise_trace"], fields["gradient_square"] = finite((noise.trace, noise.square))
        if "cosine" in self._wanted:
            reach = self._prepared.trainer.rules.reach
            aligned = alignment(copy.stages, copy.heads, reach, loss, [self._examples(train, COSINE_EXAMPLES)])
            fields |= {"cosines": finite(aligned.cosines), "local_losses": finite(aligned.losses)}
        if "probes" in self._wanted:
            fitted, tested = (self._examples(split, PROBE_EXAMPLES) for split in (train, dataset.validation))
            fields["probes"] = finite(probes(copy.stages, fitted, tested))
        if "filters" in self._wanted:
            x, _ = train.first(1)
            pictures = filters(model, x.shape[1:]) if isinstance(x, Tensor) else None
            if pictures is not None:
                shape = (pictures.channels, pictures.height, pictures.width)
                fields |= {"filters": pictures.pictures, "filter_shape": shape}
        return fields

    def _examples(self, split: RowReader, targets: int) -> tuple[Any, Any]:
        """Examples with about `targets` targets together, on the models' device."""
        _, y = split.first(1)
        each = sum(leaf.numel() for leaf in tree_flatten(y)[0] if isinstance(leaf, Tensor))
        chosen = sample(split, max(1, targets // max(1, each)))
        return on(self._prepared.trainer.device, chosen.x, chosen.y)


def sample(train: RowReader, examples: int) -> TensorSplit:
    """At most `examples` examples, the same ones at every call."""
    return TensorSplit(*next(train.batches(min(examples, len(train)), seed=0)))


def on(device: torch.device, x: Any, y: Any) -> tuple[Any, Any]:
    """A batch on a device."""
    return to_device(x, device), to_device(y, device)


def finite(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Values with None for those that are no finite number: JSON has no others, and a diverging run has some."""
    return tuple(value if value is not None and math.isfinite(value) else None for value in values)


EVALUATION_BATCH = 128
TRAIN_SAMPLE = 512  # training examples that train loss and accuracy are evaluated on


def scores_of(point: Point) -> dict[str, float | None]:
    """The numbers of an evaluation by name, the user's metrics among them."""
    values = point.to_json()
    del values["step"], values["metrics"]
    return values | {f"validation_{name}": value for name, value in point.metrics.items()}


def test_scores(progress: Progress) -> dict[str, float | None]:
    """What a finished run came to on the test split; nothing of one that diverged."""
    values = {key: value for key, value in progress.final.items() if key.startswith("test_")}
    return values | {f"test_{name}": value for name, value in values.pop("test_metrics", {}).items()}


def final_scores(prepared: Prepared, last: Point, bleu: Bleu, metrics: Sequence[Metric]) -> dict[str, Any]:
    """The losses, accuracies and metrics of a finished run: those of its last evaluation, and on the test split."""
    split = prepared.dataset.test
    test: dict[str, float] = {}
    if split is not None:
        with naming_rows(lambda: f"data {prepared.dataset.name}, test, in batches of {EVALUATION_BATCH} rows"):
            test = prepared.trainer.evaluate(split.batches(EVALUATION_BATCH), by_name(metrics))
    test_metrics = {metric.name: test[metric.name] for metric in metrics if test}
    refuse_undefined(test_metrics, "on the test split")
    test_loss = test.get("loss")
    return {
        "train_loss": last.train_loss,
        "train_accuracy": last.train_accuracy,
        "validation_loss": last.validation_loss,
        "validation_accuracy": last.validation_accuracy,
        "validation_bleu": last.validation_bleu,
        "test_loss": test_loss if test_loss is not None and math.isfinite(test_loss) else None,
        "test_accuracy": test.get("accuracy"),
        "test_bleu": bleu.test(),
        "metrics": dict(last.metrics),
        "test_metrics": test_metrics,
    }


def evaluate(
    prepared: Prepared, costs: Costs, step: int, seconds: float, bleu: Bleu, metrics: Sequence[Metric]
) -> Point | None:
    """Evaluate after a step, and price the run so far; None if a loss is not finite.

    Raises UsageError for a metric that is not finite where the loss is.
    """
    dataset, trainer = prepared.dataset, prepared.trainer
    with naming_rows(lambda: f"data {dataset.name}, {TRAIN_SAMPLE} examples of train"):
        train = trainer.evaluate(train_sample(dataset))
    with naming_rows(lambda: f"data {dataset.name}, validation, in batches of {EVALUATION_BATCH} rows"):
        validation = trainer.evaluate(dataset.validation.batches(EVALUATION_BATCH), by_name(metrics))
    if not (math.isfinite(train["loss"]) and math.isfinite(validation["loss"])):
        return None
    measured = {metric.name: validation[metric.name] for metric in metrics}
    refuse_undefined(measured, f"on the validation split after step {step}")
    examples = step * known(prepared.settings.batch_size)
    return Point(
        step=step,
        examples=examples,
        total_flops=examples * costs.total,
        serial_flops=costs.serial_after(step),
        seconds=seconds,
        train_loss=train["loss"],
        validation_loss=validation["loss"],
        validation_accuracy=validation.get("accuracy"),
        validation_bleu=bleu.validation(),
        train_accuracy=train.get("accuracy"),
        metrics=measured,
    )


def train_sample(dataset: Dataset | UserData) -> Iterator[tuple[Any, Any]]:
    """The training examples that train loss and accuracy are evaluated on, the same in every run.

    Of the user's data they are evenly spread, as examples may be sorted by class; all others are shuffled: the first.
    """
    if not isinstance(dataset, UserData) or len(dataset.train) <= TRAIN_SAMPLE:
        return itertools.islice(dataset.train.batches(EVALUATION_BATCH), TRAIN_SAMPLE // EVALUATION_BATCH)
    rows = torch.arange(TRAIN_SAMPLE) * len(dataset.train) // TRAIN_SAMPLE
    return dataset.train.read_all((part, None) for part in torch.split(rows, EVALUATION_BATCH))


def by_name(metrics: Sequence[Metric]) -> dict[str, Any]:
    """The metrics' functions by name, as `Trainer.evaluate` takes them."""
    return {metric.name: metric.function for metric in metrics}


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """The steps after which to evaluate: about `evaluations`, closer together at the start, the last step among them.

    Costs are compared on logarithmic axes, so early steps have to be as far apart on them as late ones.
    """
    return {max(1, math.ceil(steps * (i / evaluations) ** 2)) for i in range(1, evaluations + 1)}
