"""From launches and runs to times on a page: seconds a step, times to a cut-off, and which of two is sooner."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from harness.cells import Cell, Record, Study
from harness.halving import final_records
from harness.intervals import Interval, against, geometric, product, ratio
from harness.launches import LAUNCHES, Launch
from harness.results import PLACES, arrivals, complete, cutoff, ratio_at

SECONDS = "seconds a step"


@dataclass(frozen=True)
class StepTime:
    """Seconds a step of one configuration, by launch; `predicted` where its link could not be made."""

    seconds: Mapping[int, float]
    noisy: bool
    predicted: bool
    others: float
    crowded: bool = False  # processes took turns on the cores

    @property
    def doubt(self) -> str:
        """Why nothing is concluded from these times; nothing where something is."""
        return "noisy" if self.noisy else "more processes than cores" if self.crowded else ""

    @property
    def interval(self) -> Interval:
        """The geometric mean over launches."""
        return geometric(list(self.seconds.values()))

    @property
    def mark(self) -> str:
        """How the page marks it: ~ for a machine that was not quiet, p for a prediction."""
        return ("~" if self.noisy else "") + ("p" if self.predicted else "")

    @property
    def shown(self) -> str:
        """Milliseconds with the marks."""
        mean, low, high = (milliseconds(end) for end in self.interval)
        return f"{self.mark}{mean} [{low}, {high}]"


def milliseconds(seconds: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{1000 * seconds:.3g}'):.10g}"


def step_time(launch: Launch, launches: Mapping[str, Record], figure: str = SECONDS) -> StepTime | None:
    """What the launches of a configuration measured; None while one is missing.

    Where the link was refused: what loopback took and the time of the bytes that a process sends, one after the other.
    """
    records = _of(launch, launches)
    if len(records) < LAUNCHES:
        return None
    refused, extra = any("refused" in record for record in records.values()), 0.0
    if refused and launch.link is not None:
        records = _of(Launch(launch.name, launch.task, launch.processes), launches)
        extra = launch.sent * 8 / (launch.link * 1e6)
        if len(records) < LAUNCHES:
            return None
    return StepTime(
        {number: record["figures"][figure] + extra for number, record in records.items()},
        any(record["noisy"] for record in records.values()),
        refused,
        max(max(record["others"]) for record in records.values()),
        any(launch.processes > record["machine"]["cores"] for record in records.values()),
    )


def bytes_told(launch: Launch, launches: Mapping[str, Record]) -> str:
    """The most that a process sent a step over a link, in MB, and what the formula says; nothing where none counted."""
    figures = [record.get("figures", {}) for record in _of(launch, launches).values()]
    counted = [each["bytes a step"] for each in figures if "bytes a step" in each]
    if launch.link is None or not counted:
        return ""
    return f"{fmean(counted) / 1e6:.3f} ({launch.sent / 1e6:.3f})"


def doubts_of(times: Iterable[StepTime]) -> str:
    """Why nothing is concluded from some of these times; nothing where something is."""
    return ", ".join(sorted({each.doubt for each in times} - {""}))


def _of(launch: Launch, launches: Mapping[str, Record]) -> dict[int, Record]:
    keys = {number: f"{launch.place} | launch {number}" for number in range(LAUNCHES)}
    return {number: launches[key] for number, key in keys.items() if key in launches}


@dataclass(frozen=True)
class Timed:
    """A way to train: the cell whose runs say how many steps it takes, and how long its steps took."""

    cell: Cell
    step: StepTime


def time_verdict(found: Interval | None, words: tuple[str, str], times: Iterable[StepTime]) -> str:
    """How a ratio of times lies to 1: the first word below it, the second above; undecided where times are doubted."""
    doubts = doubts_of(times)
    return f"undecided ({doubts})" if doubts else against(found, 1, words, unknown="undecided")


def time_to_cutoff(study: Study, runs: Mapping[str, Record], way: Timed, reference: Cell) -> Interval | None:
    """Seconds to the reference's cut-off: steps times seconds a step, the interval from both. None while not known.

    A seed that never arrives counts as later than its last step, as in ratios: there is no upper end.
    """
    cut, records = cutoff(study, runs, reference), final_records(way.cell, runs)
    if cut is None or not complete(records):
        return None
    arrived = arrivals(records, PLACES[study.metric], cut, entered=True)
    steps = ratio(arrived, dict.fromkeys(arrived, 1.0), dict.fromkeys(arrived, float(way.cell.steps)))
    return None if steps is None else product(steps, way.step.interval)


def time_ratio(study: Study, runs: Mapping[str, Record], way: Timed, other: Timed, reference: Cell) -> Interval | None:
    """The way's time to the cut-off over another's: steps seed by seed, seconds launch by launch."""
    cut = cutoff(study, runs, reference)
    mine, theirs = (final_records(each.cell, runs) for each in (way, other))
    if cut is None or not (complete(mine) and complete(theirs)):
        return None
    same = way.cell == other.cell
    steps = Interval(1.0, 1.0, 1.0) if same else ratio_at(mine, theirs, PLACES[study.metric], cut, entered=True)
    seconds = ratio(way.step.seconds, other.step.seconds, dict.fromkeys(way.step.seconds, 0.0))
    return None if steps is None or seconds is None else product(steps, seconds)


def times_to_cutoff(
    study: Study, runs: Mapping[str, Record], ways: Mapping[str, Timed], reference: Cell
) -> dict[str, Interval]:
    """The time of each way whose time is known."""
    found = {name: time_to_cutoff(study, runs, way, reference) for name, way in ways.items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def soonest(times: Mapping[str, Interval]) -> str:
    """The way with the least time; of those that do not always arrive the one with the least lower end."""
    return min(times, key=lambda name: (times[name].mean, times[name].low))


def load_told(launches: Mapping[str, Record]) -> str:
    """A sentence: how busy others kept the machine before and during launches."""
    others = [max(record["others"]) for record in launches.values() if "others" in record]
    if not others:
        return "No launch has been made yet."
    noisy = sum(record["noisy"] for record in launches.values())
    cores = {record["machine"]["cores"] for record in launches.values()}
    return (
        f"{len(others)} launches on {', '.join(map(str, sorted(cores)))} cores; other programs used at most "
        f"{max(others):.2f} cores before or during one; {noisy} were made on a machine that was not quiet (~), and "
        "nothing is concluded from those."
    )
