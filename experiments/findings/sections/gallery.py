"""The verdicts of docs/gallery.md, made of the studies' stores: one for each claim, by the study with the most seeds.

A study that repeats a claim with more seeds takes its line over here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import by_the_clock
import depth
import depth_ideas
import final_trial
import lecture
import local_updates
import slides
from clock_parts.methods import METHODS
from clock_parts.page import claim_rows as clock_rows
from harness.cells import Record, Study
from harness.clock import step_time
from harness.end_tables import percent, points, shown
from harness.intervals import against, bounded
from harness.markdown import wrapped
from harness.page import claim_rows, seeds_told
from harness.results import (
    ERROR,
    TEST,
    against_reference,
    by_error,
    cut_at,
    finals,
    last_difference,
    points_above,
    result,
)
from lecture_parts.launches import spatial
from lecture_parts.page import link_rows, speed_up

import heads
from sections import local_updates as local

PAGES = "../experiments/findings/pages"  # from docs
NEAR = 0.9  # points above no delay that PipeMare's paper allows
Runs = Mapping[str, Record]


class Verdict(NamedTuple):
    """A claim, what became of it, and the figures that say so."""

    claim: str
    verdict: str
    told: str


class Card(NamedTuple):
    """The verdicts of a study, or of several that share claims; `verdicts` takes each one's runs and launches."""

    studies: tuple[Study, ...]
    verdicts: Callable[[Sequence[Runs], Sequence[Runs]], list[Verdict]]


def own_claims(*studies: Study) -> Callable[[Sequence[Runs], Sequence[Runs]], list[Verdict]]:
    """The figures that rules set these studies: reached by some of them, missed by all, or undecided."""

    def verdicts(runs: Sequence[Runs], _: Sequence[Runs]) -> list[Verdict]:
        rows: dict[str, list[list[str]]] = {}
        for study, own in reversed(list(zip(studies, runs, strict=True))):  # the order of the last one, which adds
            found = {cell.name: result(study, own, cell) for cell in study.cells}
            for text, *row in claim_rows(study, found):
                rows.setdefault(text, []).append(row)
        told = {text: "; ".join(f"{cell}: {value}" for _, cell, value in each) for text, each in rows.items()}
        return [Verdict(text, _together([row[0] for row in each]), told[text]) for text, each in rows.items()]

    return verdicts


def _together(verdicts: Sequence[str]) -> str:
    if "reached" in verdicts:
        return "reached"
    return verdicts[0] if len(set(verdicts)) == 1 else "undecided"


def of_slides(runs: Runs, _: Runs) -> list[Verdict]:
    """The cures of three papers, by the test error at the end."""
    found = {cell.name: result(slides.STUDY, runs, cell) for cell in slides.ALL}
    none, cure, plain = (found[f"{slides.ONE}, {name}"] for name in (slides.NO_DELAY, slides.SC_LWP, slides.PB))
    rows = [
        Verdict(
            "Kosson et al. 2021: spike compensation with weight prediction matches SGD, updates of one example",
            {"undecided": "not told from SGD"}.get(by_error(cure, none), f"{by_error(cure, none)} than SGD"),
            f"error {percent(cure)}; without delay {percent(none)}; without a cure {percent(plain)}, and against that "
            f"{by_error(cure, plain)}",
        )
    ]
    for task, where in ((slides.DIGITS, "ResNet-20"), (slides.WORDS, "an encoder and decoder")):
        cell = slides.best_pipemare(runs, task)
        if cell is not None:
            above = points_above(found[cell.name].records, found[f"{task}, {slides.NO_DELAY}"].records)
            claim = f"Yang et al. 2021: PipeMare ends at most {NEAR} points above no delay, {where}"
            rows.append(Verdict(claim, bounded(above, NEAR), f"best of five settings: {points(above)} points"))
    spectrain, best = found[f"{slides.DIGITS}, {slides.SPECTRAIN}"], slides.best_pipemare(runs, slides.DIGITS)
    if best is not None:
        told = f"error {percent(spectrain)}, PipeMare {percent(found[best.name])}"
        claim = "The slides: SpecTrain works better than PipeMare"
        rows.append(Verdict(claim, by_error(spectrain, found[best.name]), told))
    return rows


def of_local_updates(runs: Runs, _: Runs) -> list[Verdict]:
    """The claims of Laskin, Metz et al. 2020."""
    found = finals(local_updates.ALL, runs)
    paper, never = "Laskin, Metz et al. 2020", {}
    for where in local.WIDTHS:
        cut = cut_at(found.get(f"{where}, backprop"), TEST, local.SHARE)
        never[where] = local.efficiency([local.both(found, where, name, TEST, cut) for name in local.LOCAL])
    less = {name: _serial(found, "decoder", name, TEST) for name in local.LOCAL}
    images = {name: _serial(found, "ResNet-20", name, ERROR) for name in local.LOCAL}
    ends = {
        name: against(
            last_difference(found.get(f"MLP 256, {name}"), found.get("MLP 256, backprop"), TEST), 0, local.LOWER
        )
        for name in ("2 chunks", "4 chunks", "greedy")
    }
    fitted = {
        name: against(
            last_difference(found.get(f"random labels, {name}"), found.get("random labels, backprop"), ERROR),
            0,
            ("lower error", "higher error"),
        )
        for name in ("2 chunks", "greedy")
    }
    counted, high = local.counted_rows(found), local.high_compute_rows(found)
    return [
        Verdict(
            f"{paper}, figures 3 and 8: backprop is never the most efficient",
            _all(never.values()),
            ", ".join(f"{where} {verdict}" for where, verdict in never.items()),
        ),
        Verdict(
            "Figure 9, a decoder: less serial compute than backprop to its own loss",
            _all(verdict for _, verdict in less.values()),
            ", ".join(f"{name} {value}" for name, (value, _) in less.items()),
        ),
        Verdict(
            "Figure 10, ResNet-20: less serial compute to its test error",
            _all(verdict for _, verdict in images.values()),
            ", ".join(f"{name} {value} ({verdict})" for name, (value, verdict) in images.items()),
        ),
        Verdict(
            "Figure 6 (b), chunks of an MLP: they end at another loss than backprop",
            _all(ends.values()),
            ", ".join(f"{name} {verdict}" for name, verdict in ends.items()),
        ),
        Verdict(
            "Local updates memorise random labels less",
            _all(fitted.values()),
            ", ".join(f"{name} {verdict}" for name, verdict in fitted.items()),
        ),
        Verdict("Memory at most pipelined backprop's", *_kept([row[4] for row in counted])),
        Verdict("Bytes at most model parallelism's", *_kept([row[7] for row in counted])),
        Verdict(
            "Serial compute over backprop's falls from batches of 64 to 1024",
            _all(row[3] for row in high),
            ", ".join(f"{name} {small} and {large}" for name, small, large, _ in high),
        ),
    ]


def _serial(found: local.Found, where: str, name: str, place: int) -> tuple[str, str]:
    serial, _ = local.both(found, where, name, place, cut_at(found.get(f"{where}, backprop"), place, local.SHARE))
    return shown(serial), against(serial, 1, local.LESS)


def _all(verdicts: Iterable[str]) -> str:
    """The verdict that all have which are not open, or "mixed"."""
    words = {verdict.strip("*") for verdict in verdicts}
    known = words - {"open"} or words
    return known.pop() if len(known) == 1 else "mixed"


def _kept(verdicts: list[str]) -> tuple[str, str]:
    kept = sum("reached" in verdict for verdict in verdicts)
    word = "reached" if kept == len(verdicts) else "mixed" if kept else "missed"
    return word, f"kept by {kept} of {len(verdicts)} pairs of a network and a method (counted)"


def of_the_clock(runs: Runs, launches: Runs) -> list[Verdict]:
    """The figure of study 5, and the same over other links."""
    rows = clock_rows(by_the_clock.STUDY, METHODS, runs, launches)
    return [Verdict(f"Setting {place}", verdict, told) for place, verdict, told in rows]


def of_the_lecture(runs: Runs, launches: Runs) -> list[Verdict]:
    """Two slabs of images against one process, and local SGD over links."""
    own, *alone = (step_time(spatial(*place), launches, "step") for place in ((2, 1), (1, 1), (1, 2)))
    rows = []
    for other, name in zip(alone, ("one thread", "two threads"), strict=True):
        value, _, verdict = speed_up(own, other).rpartition(", ")
        rows.append(
            Verdict(f"A step of AlexNet on two slabs, against one process of {name}", verdict, f"{value} times as fast")
        )
    for link, way, _, _, ratio, *_ in link_rows(runs, launches):
        if way == "local SGD":
            value, _, verdict = ratio.rpartition(", ")
            claim = f"Local SGD (every 8) against all-reduce to the same test error, {link}"
            rows.append(Verdict(claim, verdict, f"{value} of its time"))
    return rows


def of_the_trial(runs: Runs, _: Runs) -> list[Verdict]:
    """The advice as it was, against backprop."""
    study, rows = final_trial.STUDY, []
    found = {cell.name: result(study, runs, cell) for cell in study.cells}
    for name in final_trial.advised():
        advice, backprop = found[name], found[str(found[name].cell.reference)]
        told = f"by error {by_error(advice, backprop)}, {percent(advice)} and {percent(backprop)}"
        claim = f"{name} (then {final_trial.resolved(runs, advice.cell)}), against backprop by steps"
        rows.append(Verdict(claim, against_reference(advice), f"{advice.ratio} times; {told}"))
    return rows


def _one(study: Study, verdicts: Callable[[Runs, Runs], list[Verdict]]) -> Card:
    return Card((study,), lambda runs, launches: verdicts(runs[0], launches[0]))


CARDS = (
    Card((depth.STUDY, depth_ideas.STUDY), own_claims(depth.STUDY, depth_ideas.STUDY)),
    _one(slides.STUDY, of_slides),
    _one(local_updates.STUDY, of_local_updates),
    Card((heads.STUDY,), own_claims(heads.STUDY)),
    _one(lecture.STUDY, of_the_lecture),
    _one(by_the_clock.STUDY, of_the_clock),
    _one(final_trial.STUDY, of_the_trial),
)


def gallery(stores: Mapping[str, tuple[Runs, Runs]]) -> str:
    """The Markdown of all verdicts, a card each; `stores` has runs and launches by the study's name."""
    parts = ['<div class="gallery" markdown>']
    for studies, verdicts in CARDS:
        runs, launches = zip(*(stores[study.name] for study in studies), strict=True)
        first, *further = studies
        place, data = f"{PAGES}/{first.name}", " --data FOLDER" if first.needs_data else ""
        seeds = " and ".join(dict.fromkeys(map(seeds_told, studies))).capitalize()
        links = "".join(f" Also [{each.title}]({PAGES}/{each.name}/README.md)." for each in further)
        parts += [
            "<div markdown>\n",
            f"### [{first.title}]({place}/README.md)\n",
            f"![Ratios of arrivals with their intervals]({place}/figure.svg)\n",
            *(f"- {row.claim}: **{row.verdict}**; {row.told}." for row in verdicts(runs, launches)),
            f"\n{seeds} a cell.{links}\n",
            f"```text\nOMP_NUM_THREADS=1 python experiments/findings/main.py {first.name}{data}\n```\n",
            "</div>",
        ]
    return wrapped("\n".join([*parts, "</div>"])) + "\n"
