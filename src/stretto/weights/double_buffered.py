"""Two versions: every micro-batch of a minibatch sees the same weights, one update old (PipeDream-2BW)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from stretto.weights.stash import Stash, Version


class DoubleBuffered(Stash):
    """The current weights and those before the last update (Narayanan et al. 2021, arXiv 2006.09503, section 3.1).

    A forward may read the weights before the last update, but none older. The schedule must guarantee this: an update
    takes at least as many micro-batches as there are stages. The first minibatch after a drain reads the current
    weights (`schedule.Delays`).
    """

    _former: Version | None = None

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the current version (`behind` 0), or on the one before the last update (1)."""
        if behind == 0:
            return super().forward(inputs)
        assert behind == 1, f"weights {behind} updates back are asked for; two versions are kept"
        assert self._former is not None, "no update has happened yet"
        return self.run_on(self._former, inputs)

    def forget(self) -> None:
        """Drop both versions: the next forward reads the parameters."""
        super().forget()
        self._former = None

    def update(self, step: Callable[[], object]) -> None:
        """The current version becomes the former one and keeps its storage; the parameters get a copy to change."""
        self._former = self.standing()
        super().update(step)

    def held(self, versions: Iterable[Version]) -> Iterator[Tensor]:
        """As for `Stash`, and the leaves of the former version, whether or not a graph holds it."""
        yield from super().held([*versions, *([] if self._former is None else [self._former])])
