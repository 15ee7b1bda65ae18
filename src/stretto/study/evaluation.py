"""What a run is evaluated on, when, and what it comes to: losses, accuracies, the user's metrics, costs so far."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stretto.data import Dataset
from stretto.data.user_data import UserData
from stretto.measure import Costs
from stretto.report.record import Point
from stretto.settings.runs import known
from stretto.study.measurements import Bleu
from stretto.study.prepare import Prepared
from stretto.study.run_progress import Progress
from stretto.trainer.evaluate import Metric, refuse_undefined

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
    train = trainer.evaluate(train_sample(dataset))
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
