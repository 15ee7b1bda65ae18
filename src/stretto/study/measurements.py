"""What is measured while a run trains, without disturbing it.

`Bleu` translates at every evaluation, `ObservationWindows` observe the weights that stages see, and `Measurer` takes
what `--measure` asks for. `Bleu` and `Measurer` work on a copy of the weights, gathered from all processes.
"""

import math
from collections.abc import Mapping, Sequence, Set
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
from stretto.data.dataset import RowReader
from stretto.data.user_data import TensorSplit
from stretto.models.encoder_decoder import find_bleu, score
from stretto.nn.batch import to_device
from stretto.nn.chain import Chain
from stretto.report.record import Measurement, Observation
from stretto.settings.runs import known
from stretto.study.prepare import Prepared, build_model, prepare, stages_of
from stretto.trainer.backend import in_one_process
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
    "workers": None, "data_parallel": 1, "tensor": 1, "space": (1, 1), "sync": "all-reduce", "precision": "float32",
}  # fmt: skip


class ModelCopy:
    """The run's network in float32, cut into the same stages; built when it is first needed."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._model: Chain | None = None

    def load(self, weights: Mapping[str, Tensor]) -> Chain:
        """Load the weights that `Trainer.gather` returned, without those of heads, and return the network."""
        if self._model is None:
            settings, train = self._prepared.settings, self._prepared.dataset.train
            model = build_model(settings, settings.seed)
            stages = stages_of(settings, model, train.first(known(settings.batch_size))[0])
            self._model = Chain(*stages).to(self._prepared.trainer.device)
        self._model.load_state_dict({key: value for key, value in weights.items() if not key.startswith("heads.")})
        return self._model


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
        model, device = self._copy.load(weights), self._prepared.trainer.device
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
        self._stages_and_heads: tuple[list[nn.Module], list[nn.Module | None]] | None = None

    def measure(self, step: int) -> Measurement | None:
        """The measurements after a step; None if nothing is measured at this step."""
        if step not in self._steps:
            return None
        weights = self._prepared.trainer.gather()
        return Measurement(step=step) if weights is None else self._measure(step, weights)

    def _measure(self, step: int, weights: Mapping[str, Tensor]) -> Measurement:
        model, loss, train = self._copy.load(weights), self._prepared.model.loss, self._prepared.dataset.train
        device = self._prepared.trainer.device
        sharp, trace, square = None, None, None
        if "sharpness" in self._wanted:
            batches = [on(device, *batch) for batch in sample(train, SHARP_EXAMPLES).batches(SHARP_EXAMPLES)]
            sharp = sharpness(model, loss, batches).value
        if "noise" in self._wanted:
            small = min(NOISE_BATCH, len(train) // 2)
            pairs = sample(train, NOISE_EXAMPLES).batches(small, drop_last=True)
            noise = noise_scale(model, loss, (on(device, x, y) for x, y in pairs))
            trace, square = noise.trace, noise.square
        sharp, trace, square = finite((sharp, trace, square))
        return Measurement(
            step=step, sharpness=sharp, noise_trace=trace, gradient_square=square, **self._by_stage(weights)
        )

    def _by_stage(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """The fields of a `Measurement` that have a value for each stage, and the filters."""
        dataset, fields = self._prepared.dataset, dict[str, Any]()
        stages, heads = self._load(weights) if {"cosine", "probes", "filters"} & set(self._wanted) else ([], [])
        if "cosine" in self._wanted:
            reach, loss = self._prepared.trainer.rules.reach, self._prepared.model.loss
            aligned = alignment(stages, heads, reach, loss, [self._examples(dataset.train, COSINE_EXAMPLES)])
            fields |= {"cosines": finite(aligned.cosines), "local_losses": finite(aligned.losses)}
        if "probes" in self._wanted:
            fitted, tested = (self._examples(split, PROBE_EXAMPLES) for split in (dataset.train, dataset.validation))
            fields["probes"] = finite(probes(stages, fitted, tested))
        if "filters" in self._wanted:
            x, _ = dataset.train.first(1)
            pictures = filters(Chain(*stages), x.shape[1:]) if isinstance(x, Tensor) else None
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

    def _load(self, weights: Mapping[str, Tensor]) -> tuple[list[nn.Module], list[nn.Module | None]]:
        """Copies of the run's stages and heads, in float32, with these weights."""
        if self._stages_and_heads is None:
            with in_one_process():
                trainer = prepare(replace(self._prepared.settings, **ONE_PROCESS)).trainer
            self._stages_and_heads = list(trainer.stages), list(trainer.heads)
        stages, heads = self._stages_and_heads
        by_prefix = {f"{index}.": stage for index, stage in enumerate(stages)}
        by_prefix |= {f"heads.{index}.": head for index, head in enumerate(heads) if head is not None}
        for prefix, module in by_prefix.items():
            module.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
        return stages, heads


def sample(train: RowReader, examples: int) -> TensorSplit:
    """At most `examples` examples, the same ones at every call."""
    return TensorSplit(*next(train.batches(min(examples, len(train)), seed=0)))


def on(device: torch.device, x: Any, y: Any) -> tuple[Any, Any]:
    """A batch on a device."""
    return to_device(x, device), to_device(y, device)


def finite(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Values with None for those that are no finite number: JSON has no others, and a diverging run has some."""
    return tuple(value if value is not None and math.isfinite(value) else None for value in values)
