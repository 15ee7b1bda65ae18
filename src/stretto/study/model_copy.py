"""A second model with the weights of a run, to be looked at without disturbing what trains."""

from collections.abc import Mapping

from torch import Tensor

from stretto.nn.chain import Chain
from stretto.study.prepare import Prepared, build_model, stages_of


class Twin:
    """The run's network in float32, cut into the same stages; built when it is first needed."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._model: Chain | None = None

    def load(self, weights: Mapping[str, Tensor]) -> Chain:
        """Give it what `Trainer.gather` gave; heads are left out."""
        if self._model is None:
            settings, train = self._prepared.settings, self._prepared.dataset.train
            built = build_model(settings, settings.seed)
            stages = stages_of(settings, built, train.x[: settings.batch_size])
            self._model = Chain(*stages).to(self._prepared.trainer.device)
        self._model.load_state_dict({key: value for key, value in weights.items() if not key.startswith("heads.")})
        return self._model
