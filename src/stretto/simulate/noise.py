"""Times that vary: factors on the durations of actions, drawn by a seed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stretto.errors import UsageError
from stretto.schedule.lower import Lowered
from stretto.simulate.engine import Floats


@dataclass(frozen=True)
class Noise:
    """Random factors on the durations of actions. The same seed gives the same factors.

    `jitter` is the standard deviation of the logarithm of a factor whose median is 1. With probability `straggling` an
    action takes `slowdown` times as long besides. `workers` has constant factors of slow workers (2: half as fast).
    Raises UsageError for a negative or infinite number, and for a `straggling` above 1.
    """

    seed: int = 0
    jitter: float = 0.0
    straggling: float = 0.0
    slowdown: float = 1.0
    workers: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < np.inf:
            raise UsageError(f"jitter={self.jitter:g}: a standard deviation is 0 or more")
        if not 0 <= self.straggling <= 1:
            raise UsageError(f"straggling={self.straggling:g}: a probability is between 0 and 1")
        for factor in (self.slowdown, *self.workers.values()):
            if not 0 <= factor < np.inf:
                raise UsageError(f"a factor of {factor:g} on times: choose 0 or more")

    def factors(self, lowered: Lowered, turns: int) -> Floats:
        """A factor for each action (rows) and minibatch (columns). More turns do not change earlier factors."""
        size = len(lowered.actions)
        normal, uniform = (np.random.default_rng([self.seed, stream]) for stream in range(2))
        factors = np.exp(self.jitter * normal.standard_normal((turns, size)))
        factors[uniform.random((turns, size)) < self.straggling] *= self.slowdown
        slow = [self.workers.get(lowered.lanes[lane].worker, 1.0) for lane in lowered.lane_of]
        return np.ascontiguousarray((factors * slow).T)
