"""Two versions: every micro-batch of a minibatch sees the same weights, one update old (PipeDream-2BW)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from stretto.weights.stash import Stash, Version


class DoubleBuffered(Stash):
    """The standing weights and those before the last update (Narayanan et al. 2021, arXiv 2006.09503, section 3.1).

    A forward may be asked for the weights before the last update; a version further back does not exist, which the
    schedule must guarantee (as many micro-batches in an update as there are stages, or more). The first minibatch after
    a drain asks for the standing ones (`schedule.Delays`).
    """

    _former: Version | None = None

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the standing version, or on the one before it."""
        if behind == 0:
            return super().forward(inputs)
        assert behind == 1, f"weights {behind} updates back are asked for; two versions are kept"
        assert self._former is not None, "no update has happened yet"
        return self.run_on(self._former, inputs)

    def forget(self) -> None:
        """Start from the parameters as they are: there is no version before."""
        super().forget()
        self._former = None

    def update(self, step: Callable[[], object]) -> None:
        """The standing version becomes the former one, with the storage it has; the parameters move on."""
        self._former = self.standing()
        super().update(step)

    def held(self, versions: Iterable[Version]) -> Iterator[Tensor]:
        """The former version too, whether or not a graph holds it."""
        yield from super().held([*versions, *([] if self._former is None else [self._former])])
