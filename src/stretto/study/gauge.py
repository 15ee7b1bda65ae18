"""What `--measure` asks for: sharpness and noise now and then, on a copy of the weights; nothing is disturbed."""

from collections.abc import Mapping, Set

from torch import Tensor

from stretto.chain import Chain
from stretto.config import known
from stretto.data import Split
from stretto.landscape.noise import noise_scale
from stretto.landscape.sharpness import sharpness
from stretto.report.record import Measurement
from stretto.splitting import split
from stretto.study.lookout import finite
from stretto.study.prepare import Prepared, build_model

TIMES = 4  # in a run, evenly spread
SHARP_EXAMPLES = 512
NOISE_EXAMPLES, NOISE_BATCH = 1024, 8


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
        self._model: Chain | None = None

    def measure(self, step: int) -> Measurement | None:
        """What was asked for; None if it is not time."""
        if step not in self._steps:
            return None
        weights = self._prepared.trainer.gather()
        return Measurement(step=step) if weights is None else self._measure(step, weights)

    def _measure(self, step: int, weights: Mapping[str, Tensor]) -> Measurement:
        model, loss, train = self._loaded(weights), self._prepared.model.loss, self._prepared.dataset.train
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
        return Measurement(step=step, sharpness=found[0], noise_trace=found[1], gradient_square=found[2])

    def _loaded(self, weights: Mapping[str, Tensor]) -> Chain:
        """A model of its own, in float32, with these weights."""
        if self._model is None:
            settings, train = self._prepared.settings, self._prepared.dataset.train
            built = build_model(settings, settings.seed)
            stages = split(built.layers, known(settings.stages), example=train.x[: settings.batch_size])
            self._model = Chain(*stages).to(self._prepared.trainer.device)
        self._model.load_state_dict({key: value for key, value in weights.items() if not key.startswith("heads.")})
        return self._model


def sample(train: Split, examples: int) -> Split:
    """So many examples, all where there are fewer; the same ones each time."""
    x, y = next(train.batches(min(examples, len(train)), seed=0))
    return Split(x, y)
