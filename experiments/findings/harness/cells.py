"""What a study is made of: cells, each a method with its options; and runs, each a cell at one rate with one seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from harness.launches import Launch

SEEDS = (0, 1, 2)
LATER = 3  # the seed from which on runs come after those of all cells with smaller ones
MOST_RUNS = 200  # of a study
Record = Mapping[str, Any]
"""A finished run, as the store keeps it."""


@dataclass(frozen=True)
class Cell:
    """A method with its options, an optimizer and further settings, trained at its own best rate of a grid.

    `reference` names the cell that its arrivals are divided by, the same optimizer without delay; None for such a cell
    itself. `beside` names another cell without delay to be shown against, `uncured` the one with the same delay and no
    cure. `settings` are what else the study's training needs, such as the number of stages. `horizon` is T of the rules
    for a reference, where it is not the study's. `seeds` are those of rung 2, `first` the steps of rung 1, half of all
    unless given. A single rate was fixed by the rules: there is no rung 1 then.
    """

    name: str
    method: str
    optimizer: str
    rates: tuple[float, ...]
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: str | None = None
    beside: str | None = None
    uncured: str | None = None
    horizon: int | None = None
    seeds: tuple[int, ...] = SEEDS
    first: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a grid that the rules do not allow."""
        rates = list(self.rates)
        if len(rates) not in (1, *range(4, 100)) or rates != sorted(set(rates)) or rates[0] <= 0:
            raise ValueError(f"cell {self.name!r}: rates={self.rates}: give one, or four and more from small to large")

    @property
    def is_fixed(self) -> bool:
        """Whether the rules fix its rate, so that no rung chooses it."""
        return len(self.rates) == 1

    @property
    def rung(self) -> int:
        """Steps of a run of the first rung."""
        return self.first or self.steps // 2

    @property
    def base_runs(self) -> int:
        """How many runs it has if its grid is not extended."""
        return len(self.seeds) + (0 if self.is_fixed else len(self.rates))


@dataclass(frozen=True)
class Run:
    """A cell at one rate, with one seed, for so many steps."""

    cell: Cell
    rate: float
    seed: int
    steps: int

    @property
    def counts(self) -> bool:
        """Whether it is the one run of its cell that also counts what the method costs: the first seed of rung 2."""
        return self.seed == self.cell.seeds[0] and self.steps == self.cell.steps

    @property
    def key(self) -> str:
        """The run's name in the store."""
        return key_of(self.cell.name, self.rate, self.seed, self.steps)


def key_of(cell: str, rate: float, seed: int, steps: int) -> str:
    """The name of such a run in the store."""
    return f"{cell} | rate {rate:.6g} | seed {seed} | {steps} steps"


@dataclass(frozen=True)
class Claim:
    """A figure to reach, by any of some cells: a ratio of arrivals at most `bound`, or a gap in % of the last loss."""

    text: str
    kind: Literal["ratio", "gap"]
    cells: tuple[str, ...]
    bound: float
    aim: float | None = None


@dataclass(frozen=True)
class Study:
    """One study: its cells, how one of them is trained, and what it is to answer.

    train: (cell, rate, seed, steps, data) -> what `measured_training` returns; `data` is the folder of the data, or
    None. horizon: T of the rules; the cut-off is what every seed of a reference has reached at `share` of it in test
    loss, or in test error or training loss since the evaluation before, where `metric` says so. baseline: what
    references are, and plain: what `uncured` cells are, in words of the page. added: cells and rates that a rule named
    later, each trained once more, for all steps with the first seed. answer: paragraphs written once the runs were
    there. tried: those on what was tried and dropped. more: further Markdown for the page, made of the finished runs.
    launches: what is timed in processes; clock: the Markdown made of the finished runs and launches, by key.
    """

    name: str
    title: str
    question: str
    cells: tuple[Cell, ...]
    train: Callable[[Cell, float, int, int, str | None], dict[str, Any]]
    horizon: int
    share: float = 0.9
    metric: Literal["loss", "error", "training"] = "loss"
    baseline: str = "no delay"
    plain: str = "the same delay without the cure"
    added: tuple[tuple[str, float], ...] = ()
    claims: tuple[Claim, ...] = ()
    setting: str = ""
    answer: Sequence[str] = ()
    tried: Sequence[str] = ()
    more: Callable[[Mapping[str, Record]], str] | None = None
    launches: Sequence["Launch"] = ()
    clock: Callable[[Mapping[str, Record], Mapping[str, Record]], str] | None = None
    needs_data: bool = True  # whether its command is given a folder, with --data

    def __post_init__(self) -> None:
        """Raise ValueError for names that fit no cell, or for more runs than the rules allow."""
        names = [cell.name for cell in self.cells]
        if len(set(names)) < len(names):
            raise ValueError(f"study {self.name!r}: two cells have the same name")
        wanted = [each for cell in self.cells for each in (cell.reference, cell.beside, cell.uncured) if each]
        wanted += [name for claim in self.claims for name in claim.cells] + [name for name, _ in self.added]
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            raise ValueError(f"study {self.name!r}: no cell is called {', '.join(unknown)}")
        if self.base_runs > MOST_RUNS:
            raise ValueError(f"study {self.name!r}: {self.base_runs} runs; the rules allow {MOST_RUNS}")

    @property
    def base_runs(self) -> int:
        """How many runs it has if no grid is extended."""
        return sum(cell.base_runs for cell in self.cells) + len(self.added)

    @property
    def added_runs(self) -> list[Run]:
        """The runs that a rule named later."""
        return [
            Run(self.cell(name), rate, self.cell(name).seeds[0], self.cell(name).steps) for name, rate in self.added
        ]

    def cell(self, name: str) -> Cell:
        """The cell of this name."""
        return next(cell for cell in self.cells if cell.name == name)
