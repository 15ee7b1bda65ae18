"""The page's section on time to the same test error, made of study 5's runs and launches."""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.cells import Cell, Record, Study
from harness.clock import (
    Timed,
    bytes_told,
    doubts_of,
    load_told,
    soonest,
    step_time,
    time_ratio,
    time_verdict,
    times_to_cutoff,
)
from harness.intervals import Interval, bounded
from harness.markdown import table

from clock_parts.launches import SYNCHRONOUS, launch, letters, ways
from clock_parts.settings import LINKS, PROCESSES, Chosen, Links

TIMES = 1.5  # as soon as the best synchronous way
CLAIMED = ("B", 2, 100)  # setting, processes, Mbit/s
OPEN = "not measured yet"
Records = Mapping[str, Record]


@dataclass(frozen=True)
class Place:
    """A setting on so many processes over a link."""

    letter: str
    processes: int
    link: int | None

    def __str__(self) -> str:
        where = "loopback" if self.link is None else f"{self.link} Mbit/s"
        return f"{self.letter}, {self.processes} processes, {where}"


def clock(study: Study, methods: Chosen, runs: Records, launches: Records, links: Links = LINKS) -> str:
    """The claims, then a table for each place."""
    parts = [
        f"## Time to the same test error\n\n{load_told(launches)}\n",
        "Seconds are steps to the cut-off, from the runs, times seconds a step, from three launches of processes with "
        "one thread each; intervals from both, half widths of logarithms as squares. *Times as soon*: the least mean "
        "time of the synchronous ways over this one's, steps seed by seed and seconds launch by launch. p: predicted "
        "from loopback and the bytes that a process sends a step, where links between hosts are not allowed. Links "
        "have no delay of their own. Cores of others leave out what the kernel does for links. Processes beyond the "
        "number of cores take turns, and nothing is concluded from their times. Freed memory is kept in every process, "
        "as a Trainer has it. *MB sent*: the most that a process sends a step by the kernel's counts, headers "
        "included, and by the formula.\n",
        _claims(study, methods, runs, launches, links),
    ]
    places = [Place(letter, number, link) for letter in letters(methods) for number in PROCESSES for link in links]
    parts += [_table(study, methods, runs, launches, place) for place in places]
    return "\n".join(parts)


def _timed(study: Study, methods: Chosen, launches: Records, place: Place) -> dict[str, Timed]:
    """The ways whose steps are known here."""
    found = {}
    for way in ways(methods, place.letter, place.processes):
        link = None if way == SYNCHRONOUS[0] else place.link
        step = step_time(launch(methods, place.letter, way, place.processes, link), launches)
        if step is not None:
            stages = "synchronous" if way in SYNCHRONOUS else f"{way}, {place.processes} stages"
            found[way] = Timed(study.cell(f"{place.letter}, {stages}"), step)
    return found


def _best(times: Mapping[str, Interval], *, synchronous: bool, complete: int) -> str | None:
    """The soonest of the synchronous ways, or of the others; None while one of them is not known."""
    own = {name: seconds for name, seconds in times.items() if (name in SYNCHRONOUS) == synchronous}
    return soonest(own) if len(own) == complete else None


def _claims(study: Study, methods: Chosen, runs: Records, launches: Records, links: Links) -> str:
    """The figure, and what the same setting comes to over other links."""
    rows = [[text, f"**{verdict}**", told] for text, verdict, told in claim_rows(study, methods, runs, launches, links)]
    return table(("figure", "verdict", "way and times as soon"), rows)


def claim_rows(
    study: Study, methods: Chosen, runs: Records, launches: Records, links: Links = LINKS
) -> list[tuple[str, str, str]]:
    """The figure in each place, what became of it, and how many times as soon which way is."""
    rows = []
    letter, processes, fixed = CLAIMED
    reference = study.cell(f"{letter}, synchronous")
    text = f"the best asynchronous or local way at least {TIMES} times as soon as every synchronous one"
    for link in (fixed, *(link for link in links if link != fixed)):
        place = Place(letter, processes, link)
        timed = _timed(study, methods, launches, place)
        times = times_to_cutoff(study, runs, timed, reference)
        ours = _best(times, synchronous=False, complete=len(methods))
        verdict, told = "not finished", ""
        if ours is not None and times.keys() >= {*SYNCHRONOUS}:
            verdict, told = _judged(study, runs, ours, timed, reference)
        rows.append((f"{place}: {text if link == fixed else 'the same, no figure'}", verdict, told))
    return rows


def _judged(study: Study, runs: Records, ours: str, timed: Mapping[str, Timed], reference: Cell) -> tuple[str, str]:
    """Reached if it is so against each of the synchronous ways, missed if it is not against some."""
    ratios = {name: time_ratio(study, runs, timed[ours], timed[name], reference) for name in SYNCHRONOUS}
    verdicts = {bounded(found, 1 / TIMES) for found in ratios.values()}
    verdict = "missed" if "missed" in verdicts else "reached" if verdicts == {"reached"} else "undecided"
    steps = [timed[name].step for name in (ours, *SYNCHRONOUS)]
    doubts, marks = doubts_of(steps), "".join(sorted({*"".join(step.mark for step in steps)}))
    told = ", ".join(f"{_as_soon(found)} as {name}" for name, found in ratios.items())
    return f"undecided ({doubts})" if doubts else verdict, f"{ours}: {marks}{told}"


def _as_soon(found: Interval | None) -> str:
    """How many times as soon: the ratio of times, turned over."""
    if found is None:
        return "not known"
    if found.high == float("inf"):
        return f"< {1 / found.low:.2f}"
    return str(Interval(1 / found.mean, 1 / found.high, 1 / found.low))


def _table(study: Study, methods: Chosen, runs: Records, launches: Records, place: Place) -> str:
    timed, reference = _timed(study, methods, launches, place), study.cell(f"{place.letter}, synchronous")
    times = times_to_cutoff(study, runs, timed, reference)
    theirs = _best(times, synchronous=True, complete=len(SYNCHRONOUS))
    synchronous = [timed[name].step for name in SYNCHRONOUS if name in timed]
    rows = []
    for way, method in ways(methods, place.letter, place.processes).items():
        shown, others, ratio, verdict = OPEN, "", "", ""
        if way in timed:
            shown, others = timed[way].step.shown, f"{timed[way].step.others:.2f}"
        if way in times and theirs is not None and way != theirs:
            found = time_ratio(study, runs, timed[way], timed[theirs], reference)
            ratio, verdict = _as_soon(found), time_verdict(found, ("sooner", "later"), (timed[way].step, *synchronous))
        name = f"{way}, `{method}`" if way not in SYNCHRONOUS else way
        link = None if way == SYNCHRONOUS[0] else place.link
        sent = bytes_told(launch(methods, place.letter, way, place.processes, link), launches)
        rows.append([name, shown, str(times.get(way, "")), ratio, verdict, others, sent])
    head = ("way", "a step, ms", "seconds to the error", "times as soon", "verdict", "cores of others", "MB sent")
    return f"### {place}\n\n{table(head, rows)}"
