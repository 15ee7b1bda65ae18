"""BLEU of a run's translations, where its task is to translate."""

from stretto.data import Split
from stretto.models.greedy_decode import find_bleu, score
from stretto.study.model_copy import Twin
from stretto.study.prepare import Prepared

SAMPLE = 64  # validation examples that are translated at each evaluation; at the end the whole test split


class Scorer:
    """Translates greedily with a copy of the weights. On several processes a collective; the first one translates."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._twin = Twin(prepared)

    def validation(self) -> float | None:
        """BLEU on the first validation examples; None for other tasks, and where another process has it."""
        validation = self._prepared.dataset.validation
        return self._score(Split(validation.x[:SAMPLE], validation.y[:SAMPLE]))

    def test(self) -> float | None:
        """BLEU on the test split."""
        return self._score(self._prepared.dataset.test)

    def _score(self, split: Split) -> float | None:
        text = self._prepared.dataset.text
        weights = None if text is None else self._prepared.trainer.gather()
        if text is None or weights is None:
            return None
        model, device = self._twin.load(weights), self._prepared.trainer.device
        return score(model, split.x[:].to(device), split.y[:].to(device), text, find_bleu())
