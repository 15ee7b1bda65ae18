"""The costs of stages of which each worker has several, and what a cut of the layers comes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from stretto.cost.layer_sums import Numbers
from stretto.plan.partition import Partition

Tables = Sequence[Numbers]


@dataclass(frozen=True)
class WorkerStages:
    """The costs of stages by their layers [i, j), and the workers that hold them.

    The load of a worker is the sum of its stages' `load` and the largest of their `top`. The value of a cut is the
    largest load of a worker, and the sum of `used` over all stages. `top` and `used` are nothing where they are None. A
    worker needs the sum of its stages' `kept` bytes and the largest of their `passing` ones. A worker's stages lie one
    loop apart, or in a V: stage s is of the worker of stage S - 1 - s.
    """

    load: Tables
    top: Tables | None
    used: Tables | None
    kept: Tables
    passing: Tables
    memory: Sequence[float]  # of each worker
    in_v: bool

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.load[0]) - 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.load)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.memory)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each worker, ascending."""
        if self.in_v:
            return tuple((worker, self.stages - 1 - worker) for worker in range(self.workers))
        return tuple(tuple(range(worker, self.stages, self.workers)) for worker in range(self.workers))

    def load_of(self, worker: int, spans: Sequence[tuple[int, int]]) -> float:
        """The load of a worker if stage s has the layers spans[s]; infinite where they do not fit into its memory."""
        own = [(s, spans[s]) for s in self.stages_of[worker]]
        kept, passing = (
            (float(self.kept[s][span]) for s, span in own),
            (float(self.passing[s][span]) for s, span in own),
        )
        if not sum(kept) + max(passing) <= self.memory[worker]:
            return inf
        top = max(float(self.top[s][span]) for s, span in own) if self.top else 0.0
        return sum(float(self.load[s][span]) for s, span in own) + top

    def cut(self, bounds: tuple[int, ...]) -> Partition:
        """A cut with its value; infinite where it does not fit."""
        spans = list(pairwise(bounds))
        used = sum(float(table[span]) for table, span in zip(self.used, spans, strict=True)) if self.used else 0.0
        return Partition(bounds, max(self.load_of(worker, spans) for worker in range(self.workers)) + used)
