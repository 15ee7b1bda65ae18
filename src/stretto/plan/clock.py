"""What a plan must know of a method: who holds how much when, and what of a turn is exposed. Closed forms.

They are those of the schedules that `stretto.methods` lays out; tests compare the two.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from stretto.errors import UsageError, nearest
from stretto.schedule.even_split import bounds

Family = Literal["synchronous", "asynchronous", "local"]
Messages = Literal["exposed", "streamed", "hidden"]
Order = Literal["line", "loop", "breadth first", "v"]
Waits = Literal["chunk", "hop"]


class At(NamedTuple):
    """Stage `stage` of `stages`, in a turn of `microbatches`; `chunks` are those that a loss each trains."""

    stage: int
    stages: int
    microbatches: int
    chunks: int = 1

    @property
    def above(self) -> int:
        """The stages behind it."""
        return self.stages - 1 - self.stage

    @property
    def ends_chunk(self) -> bool:
        """Whether a chunk ends with it, as `Method` cuts them."""
        return any(bounds(self.stages, chunk, self.chunks)[1] == self.stage + 1 for chunk in range(self.chunks))


def one(_: At) -> float:
    """One of it."""
    return 1


def none(_: At) -> float:
    """Nothing of it."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Clock:
    """A method as plans see it.

    `cut` says which option takes the micro-batches of a turn, if one does, at `least` so many. `held` is the
    micro-batches whose activations a stage keeps, `versions` those of its weights, `delay` how many updates old its
    gradients are. `messages`: "exposed" ones add to every turn (as few micro-batches are under way as there are
    stages), "streamed" ones only where they take longer than a forward or a backward, "hidden" ones where they take
    longer than both.
    `split` methods run I and W where others run B; `late` weight gradients fill the bubble. `heads` says which stages
    have a head of their own. `chunks` is the stages of a worker, taken up in an `order`. A stage `waits` in every turn
    for those above it in its chunk, or for the one above it ("hop"). `optimizers` are those that it is built on; any if
    there are none.
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
    order: Order = "line"
    waits: Waits | None = None
    least: Callable[[int], int] = lambda workers: 1
    optimizers: tuple[str, ...] = ()
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


def in_a_v(at: At) -> float:
    """Both stages of a worker together hold 2W forwards."""
    return min(at.microbatches, at.stages // 2)


def after(at: At) -> float:
    """PipeDream's clock: S-s."""
    return at.above + 1


def ticks(at: At) -> float:
    """Pipelined backpropagation's clock: 2(S-1-s)+1."""
    return 2 * at.above + 1


PB = Clock(family="asynchronous", held=ticks, delay=lambda at: 2 * at.above, messages="hidden")
PIPEDREAM = Clock(family="asynchronous", held=after, versions=after, delay=lambda at: at.above)
OVERLAPPING = Clock(
    family="local", messages="hidden", split=True, heads=lambda at: at.above > 0 and at.stage > 0, options="delay=1",
    held=lambda at: 2 if at.stages > 1 else 1, versions=lambda at: 2 if at.stages > 1 else 1,
    delay=lambda at: 1 if at.stages > 1 else 0,
)  # fmt: skip
STEEP, STEPPING = ("sgd",), ("sgd", "adam", "adamw")  # what velocities, and what optimizers' own steps, are read off
CLOCKS: Mapping[str, Clock] = {
    "backprop": Clock(family="synchronous"),
    "gpipe": Clock(
        family="synchronous", cut="microbatches", held=lambda at: at.microbatches, messages="streamed"
    ),
    "1f1b": Clock(family="synchronous", cut="microbatches", held=one_f_one_b),
    "zb-h1": Clock(
        family="synchronous", cut="microbatches", held=lambda at: min(at.microbatches, at.stages), split=True, late=True
    ),
    "zb-v": Clock(
        family="synchronous", cut="microbatches", held=in_a_v, messages="hidden", split=True, chunks=2, order="v",
        least=lambda workers: 2 * workers - 1,  # fewer leave a bubble that no closed form has
    ),
    "interleaved": Clock(family="synchronous", cut="microbatches", held=interleaved, chunks=2, order="loop"),
    "looped-bfs": Clock(
        family="synchronous", cut="microbatches", held=lambda at: at.microbatches, messages="streamed", chunks=2,
        order="breadth first", least=lambda workers: workers,  # fewer are GPipe with more messages
    ),
    "pipedream": PIPEDREAM,
    "pipedream-2bw": Clock(
        family="asynchronous", cut="microbatches", held=after, versions=lambda at: 2 if at.stages > 1 else 1,
        delay=lambda at: 1 if at.stages > 1 else 0, least=lambda workers: workers,  # or two versions would not do
    ),
    "paci": Clock(family="asynchronous", cut="every", held=after, delay=lambda at: at.above / at.microbatches),
    "spectrain": replace(PIPEDREAM, versions=one, optimizers=STEEP),
    "pipeoptim": replace(PIPEDREAM, versions=one, optimizers=STEPPING),
    "nesterov": replace(PIPEDREAM, optimizers=("nadam",)),
    "pb": PB,
    "pb-sc": replace(PB, optimizers=STEEP),
    "pb-lwp": replace(PB, optimizers=STEEP),
    "pb-lwpw": PB,
    "pb-lwp-sc": replace(PB, optimizers=STEEP),
    "pipemare": PB,
    "greedy": Clock(family="local", messages="hidden", returns=False, heads=lambda at: at.above > 0),
    "chunked": Clock(
        family="local", messages="hidden", heads=lambda at: at.above > 0 and at.ends_chunk, waits="chunk"
    ),
    "overlapping": OVERLAPPING,
    "overlapping(delay=0)": replace(
        OVERLAPPING, held=one, versions=one, delay=none, waits="hop", options=""
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
