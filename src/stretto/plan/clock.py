"""What a plan must know of a method: who holds how much when, and what of a turn is exposed. Closed forms.

They are those of the schedules that `stretto.methods` lays out; tests compare the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

from stretto.errors import UsageError, nearest

Family = Literal["synchronous", "asynchronous", "local"]
Messages = Literal["exposed", "streamed", "hidden"]


class At(NamedTuple):
    """Stage `stage` of `stages`, in a turn of `microbatches`."""

    stage: int
    stages: int
    microbatches: int

    @property
    def above(self) -> int:
        """The stages behind it."""
        return self.stages - 1 - self.stage


def one(_: At) -> float:
    """One of it."""
    return 1


def none(_: At) -> float:
    """Nothing of it."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A method as plans see it.

    `cut` says which option takes the micro-batches of a turn, if one does. `held` is the micro-batches whose
    activations a stage keeps, `versions` those of its weights, `delay` how many updates old its gradients are.
    `messages`: "exposed" ones add to every turn (as few micro-batches are under way as there are stages), "streamed"
    ones only where they take longer than a forward or a backward, "hidden" ones where they take longer than both.
    `split` methods run I and W where others run B; `late` weight gradients fill the bubble. `heads` says which stages
    have a head of their own. `chunks` is the stages of a worker.
    """

    family: Family
    cut: str | None = None
    held: Callable[[At], float] = one
    versions: Callable[[At], float] = one
    delay: Callable[[At], float] = none
    messages: Messages = "exposed"
    split: bool = False
    late: bool = False
    returns: bool = True  # whether gradients travel
    heads: Callable[[At], bool] = lambda at: False
    chunks: int = 1
    options: str = ""

    @property
    def drains(self) -> bool:
        """Whether every minibatch is finished before the next one enters."""
        return self.family == "synchronous"


def one_f_one_b(at: At) -> float:
    """min(M, S-s)."""
    return min(at.microbatches, at.above + 1)


def interleaved(at: At) -> float:
    """A chunk's share of its worker's ((v-1) W + 2 (W-1-w) + 1) forwards before the first backward, v = 2."""
    workers = at.stages // 2
    return min(at.microbatches, (workers + 2 * (workers - 1 - at.stage % workers) + 1) / 2)


def after(at: At) -> float:
    """PipeDream's clock: S-s."""
    return at.above + 1


def ticks(at: At) -> float:
    """Pipelined backpropagation's clock: 2(S-1-s)+1."""
    return 2 * at.above + 1


CLOCKS: Mapping[str, Clock] = {
    "backprop": Clock(family="synchronous"),
    "gpipe": Clock(
        family="synchronous", cut="microbatches", held=lambda at: at.microbatches, messages="streamed"
    ),
    "1f1b": Clock(family="synchronous", cut="microbatches", held=one_f_one_b),
    "zb-h1": Clock(
        family="synchronous", cut="microbatches", held=lambda at: min(at.microbatches, at.stages), split=True, late=True
    ),
    "interleaved": Clock(family="synchronous", cut="microbatches", held=interleaved, chunks=2),
    "pipedream": Clock(family="asynchronous", held=after, versions=after, delay=lambda at: at.above),
    "pipedream-2bw": Clock(
        family="asynchronous", cut="microbatches", held=after, versions=lambda at: 2 if at.stages > 1 else 1,
        delay=lambda at: 1 if at.stages > 1 else 0,
    ),
    "paci": Clock(family="asynchronous", cut="every", held=after, delay=lambda at: ceil(at.above / at.microbatches)),
    "spectrain": Clock(family="asynchronous", held=after, delay=lambda at: at.above),
    "pb": Clock(family="asynchronous", held=ticks, delay=lambda at: 2 * at.above, messages="hidden"),
    "pb-lwp-sc": Clock(family="asynchronous", held=ticks, delay=lambda at: 2 * at.above, messages="hidden"),
    "pipemare": Clock(family="asynchronous", held=ticks, delay=lambda at: 2 * at.above, messages="hidden"),
    "greedy": Clock(family="local", messages="hidden", returns=False, heads=lambda at: at.above > 0),
    "overlapping": Clock(
        family="local", held=lambda at: 2 if at.stages > 1 else 1, versions=lambda at: 2 if at.stages > 1 else 1,
        delay=lambda at: 1 if at.stages > 1 else 0, messages="hidden", split=True,
        heads=lambda at: at.above > 0 and at.stage > 0, options="delay=1",
    ),
}  # fmt: skip
FAMILIES: Mapping[str, tuple[str, ...]] = {
    family: tuple(name for name, clock in CLOCKS.items() if clock.family == family)
    for family in ("synchronous", "asynchronous", "local")
}


def clocks(words: "tuple[str, ...]") -> tuple[str, ...]:
    """Names of methods from names, families and "all". Raises UsageError for what is neither."""
    found: list[str] = []
    for word in words:
        if word != "all" and word not in FAMILIES and word not in CLOCKS:
            raise UsageError(f"cannot plan for method {word!r}: {nearest(word, [*CLOCKS, *FAMILIES, 'all'])}")
        found += CLOCKS if word == "all" else FAMILIES.get(word, (word,))
    return tuple(dict.fromkeys(found))
