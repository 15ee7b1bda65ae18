"""When an asynchronous method trains synchronously: at its beginning, at its end."""

from dataclasses import dataclass

from stretto.errors import UsageError


@dataclass(frozen=True)
class Phases:
    """Minibatches before `warmup` and those from `finish` on are synchronous: each one's update before the next enters.

    PipeMare's T3 is such a warm-up (Yang et al. 2021, arXiv 1910.05124). Between phases the pipeline drains. Cures
    change nothing in a synchronous phase, but go on to follow the weights, to know past updates when it ends.
    """

    warmup: int = 0
    finish: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("warmup", self.warmup), ("finish", self.finish)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise UsageError(f"{name}={value!r}: a number of minibatches, 0 or more")
        if self.finish is not None and self.finish < self.warmup:
            raise UsageError(
                f"finish={self.finish} comes before warmup={self.warmup} is over: nothing would be asynchronous; use a "
                "later finish, or a synchronous method such as 1f1b"
            )

    def synchronous(self, minibatch: int) -> bool:
        """Whether a minibatch, counted from 0, belongs to a synchronous phase."""
        return minibatch < self.warmup or (self.finish is not None and minibatch >= self.finish)

    def synchronous_among(self, minibatches: int) -> int:
        """How many of the first `minibatches` minibatches are synchronous."""
        late = 0 if self.finish is None else max(0, minibatches - self.finish)
        return min(self.warmup, minibatches) + late

    def __bool__(self) -> bool:
        return self.warmup > 0 or self.finish is not None
