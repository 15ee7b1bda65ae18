"""What `--measure` asks for, now and then, on a copy of the weights; nothing is disturbed."""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from stretto.analysis.filters import filters
from stretto.analysis.gradient_cosine import alignment
from stretto.analysis.linear_probes import probes
from stretto.analysis.noise_scale import noise_scale
from stretto.analysis.sharpness import sharpness
from stretto.data import Split
from stretto.nn.chain import Chain
from stretto.report.record import Measurement
from stretto.settings.runs import known
from stretto.study.model_copy import Twin
from stretto.study.observation_windows import finite
from stretto.study.prepare import Prepared, prepare
from stretto.trainer.backend import alone

TIMES = 4  # in a run, evenly spread
SHARP_EXAMPLES = 512
NOISE_EXAMPLES, NOISE_BATCH = 1024, 8
COSINE_EXAMPLES = 512
PROBE_EXAMPLES = 512  # targets to fit on, and as many to test on
PLAIN: dict[str, Any] = {
    "workers": None, "data_parallel": 1, "tensor": 1, "space": (1, 1), "sync": "all-reduce", "precision": "float32",
}  # fmt: skip


class Gauge:
    """Measures what the settings ask for, at some of the steps at which the run is evaluated.

    Examples are the same in every run. On several processes it is a collective; the first one measures.
    """

    def __init__(self, prepared: Prepared, evaluated: Set[int]) -> None:
        self._prepared = prepared
        self._wanted = prepared.settings.measure or ()
        steps = known(prepared.settings.steps)
        goals = [steps * (time + 1) / TIMES for time in range(TIMES)]
        self._steps = {min(evaluated, key=lambda step: abs(step - goal)) for goal in goals} if self._wanted else set()
        self._twin = Twin(prepared)
        self._apart: tuple[list[nn.Module], list[nn.Module | None]] | None = None

    def measure(self, step: int) -> Measurement | None:
        """What was asked for; None if it is not time."""
        if step not in self._steps:
            return None
        weights = self._prepared.trainer.gather()
        return Measurement(step=step) if weights is None else self._measure(step, weights)

    def _measure(self, step: int, weights: Mapping[str, Tensor]) -> Measurement:
        model, loss, train = self._twin.load(weights), self._prepared.model.loss, self._prepared.dataset.train
        device = self._prepared.trainer.device
        sharp, trace, square = None, None, None
        if "sharpness" in self._wanted:
            batches = [(x.to(device), y.to(device)) for x, y in sample(train, SHARP_EXAMPLES).batches(SHARP_EXAMPLES)]
            sharp = sharpness(model, loss, batches).value
        if "noise" in self._wanted:
            small = min(NOISE_BATCH, len(train) // 2)
            pairs = sample(train, NOISE_EXAMPLES).batches(small, drop_last=True)
            noise = noise_scale(model, loss, ((x.to(device), y.to(device)) for x, y in pairs))
            trace, square = noise.trace, noise.square
        found = finite((sharp, trace, square))
        return Measurement(
            step=step, sharpness=found[0], noise_trace=found[1], gradient_square=found[2], **self._by_stage(weights)
        )

    def _by_stage(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """What the stages and their heads are good for."""
        dataset, found = self._prepared.dataset, dict[str, Any]()
        stages, heads = self._parts(weights) if {"cosine", "probes", "filters"} & set(self._wanted) else ([], [])
        if "cosine" in self._wanted:
            reach, loss = self._prepared.trainer.rules.reach, self._prepared.model.loss
            seen = alignment(stages, heads, reach, loss, [self._some(dataset.train, COSINE_EXAMPLES)])
            found |= {"cosines": finite(seen.cosines), "local_losses": finite(seen.losses)}
        if "probes" in self._wanted:
            fitted, tested = (self._some(split, PROBE_EXAMPLES) for split in (dataset.train, dataset.validation))
            found["probes"] = finite(probes(stages, fitted, tested))
        if "filters" in self._wanted:
            drawn = filters(Chain(*stages), dataset.train.x.shape[1:])
            if drawn is not None:
                shape = (drawn.channels, drawn.height, drawn.width)
                found |= {"filters": drawn.pictures, "filter_shape": shape}
        return found

    def _some(self, split: Split, examples: int) -> tuple[Tensor, Tensor]:
        """So many examples where the models are; fewer of those with many targets, as texts have."""
        chosen = sample(split, max(1, examples // split.y[0].numel()))
        return chosen.x[:].to(self._prepared.trainer.device), chosen.y[:].to(self._prepared.trainer.device)

    def _parts(self, weights: Mapping[str, Tensor]) -> tuple[list[nn.Module], list[nn.Module | None]]:
        """Stages and heads of their own, in float32, with these weights."""
        if self._apart is None:
            with alone():
                made = prepare(replace(self._prepared.settings, **PLAIN)).trainer
            self._apart = list(made.stages), list(made.heads)
        stages, heads = self._apart
        named = {f"{index}.": stage for index, stage in enumerate(stages)}
        named |= {f"heads.{index}.": head for index, head in enumerate(heads) if head is not None}
        for prefix, module in named.items():
            module.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
        return stages, heads


def sample(train: Split, examples: int) -> Split:
    """So many examples, all where there are fewer; the same ones each time."""
    x, y = next(train.batches(min(examples, len(train)), seed=0))
    return Split(x, y)
