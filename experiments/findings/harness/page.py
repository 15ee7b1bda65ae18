"""A study's page, made of its store alone."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.cells import MOST_RUNS, Record, Study
from harness.end_tables import above, plus_minus, shown
from harness.figure import figure
from harness.halving import extensions, rung_run, runs_left, used_rates
from harness.intervals import Interval
from harness.markdown import table, wrapped
from harness.results import Result, against_reference, against_uncured, cutoff, cutoff_step, judged, outcome, result
from stretto.system.destinations import write_whole

PAGE, FIGURE = "README.md", "figure.svg"


def write_page(
    study: Study, finished: Mapping[str, Record], folder: Path, launches: Mapping[str, Record] | None = None
) -> str:
    """Write the page and its figure into the folder; returns the page's path."""
    bound = next((claim.bound for claim in study.claims if claim.kind == "ratio"), None)
    found = [result(study, finished, cell) for cell in study.cells]
    write_whole(folder / FIGURE, figure(found, bound, study.baseline, study.metric))
    write_whole(folder / PAGE, page(study, finished, launches))
    return str(folder / PAGE)


def page(study: Study, finished: Mapping[str, Record], launches: Mapping[str, Record] | None = None) -> str:
    """The Markdown of a study's page, made of its finished runs and launches."""
    found = {cell.name: result(study, finished, cell) for cell in study.cells}
    left = [f"{len(missing)} {what}" for what, missing in _missing(study, finished, launches or {}).items() if missing]
    state = [f"**Not finished: {' and '.join(left)} are missing. Nothing below is final.**\n"] if left else []
    parts = [
        f"# {study.title}\n",
        f"{study.question}\n",
        *state,
        *(f"{paragraph}\n" for paragraph in study.answer),
        f"{study.setting}\n",
        _claims(study, found),
        f"![Ratios of arrivals with their intervals]({FIGURE})\n",
        _results(study, found.values()),
        _verdicts(study, found),
        _cutoffs(study, finished),
        study.more(finished) if study.more else "",
        study.clock(finished, launches or {}) if study.clock else "",
        _rates(study, finished),
        "## Tried and dropped\n",
        *(f"- {paragraph}" for paragraph in study.tried),
        "",
        _commands(study, finished),
    ]
    return wrapped("\n".join(parts)).rstrip("\n") + "\n"


def _missing(
    study: Study, finished: Mapping[str, Record], launches: Mapping[str, Record]
) -> dict[str, Sequence[object]]:
    made = [key for key, record in launches.items() if not record["noisy"]]
    return {"runs": runs_left(study, finished), "launches": [each for each in study.launches if each.key not in made]}


def _claims(study: Study, found: Mapping[str, Result]) -> str:
    if not study.claims:
        return ""
    rows = [[text, f"**{verdict}**", *told] for text, verdict, *told in claim_rows(study, found)]
    return "## Figures to reach\n\n" + table(("figure", "verdict", "lowest cell", "its value"), rows)


def claim_rows(study: Study, found: Mapping[str, Result]) -> list[list[str]]:
    """Each claim, what became of it, the cell with the lowest value, and this value."""
    rows = []
    for claim in study.claims:
        best, value, _ = judged(claim, found)[0]
        told = str(value)
        if claim.kind == "gap" and best.cell.reference is not None:
            told = above(best.records, found[best.cell.reference].records, sign=True)
        told = "not known yet" if value is None else told
        rows.append([claim.text, outcome(claim, found), best.cell.name, told])
    return rows


def _results(study: Study, found: Iterable[Result]) -> str:
    beside = any(cell.beside for cell in study.cells)
    text = (
        "## Every cell\n\n"
        f"Means of {seeds_told(study)} at the best rate, with the 95 % interval of the rules. *Ratio*: steps to the "
        f"cut-off over those of the same optimizer with {study.baseline}"
        f"{'; *beside*: over those of the optimizer that is not rotated' if beside else ''}. "
        "Memory in numbers for each parameter: copies of the weights + the optimizer's. ms a step is CPU time in "
        "emulation; ~ marks a machine that was not quiet.\n\n"
    )
    rows = [[each.cell.name, f"`{each.cell.method}`", *_cells(each, beside=beside)] for each in found]
    ratios = ("ratio", "beside") if beside else ("ratio",)
    head = ("cell", "method", "best rate", "steps", *ratios, "last test loss", "test error, %", "memory", "ms")
    return text + table(head, rows)


def seeds_told(study: Study) -> str:
    """How many seeds its cells have, in words."""
    few, most = (of(len(cell.seeds) for cell in study.cells) for of in (min, max))
    words = {2: "two", 3: "three", 4: "four", 5: "five"}
    told = [words.get(number, str(number)) for number in dict.fromkeys((few, most))]
    return f"{' to '.join(told)} seeds"


def _first(study: Study) -> str:
    """Where the first rung ends, and with which seed."""
    chosen = [cell for cell in study.cells if not cell.is_fixed]
    half = all(2 * cell.rung == cell.steps for cell in chosen)
    steps = ", ".join(map(str, sorted({cell.rung for cell in chosen})))
    seeds = ", ".join(map(str, sorted({cell.seeds[0] for cell in chosen})))
    return f"after {'half of the' if half else steps} steps, seed {seeds}"


def _cells(each: Result, *, beside: bool) -> list[str]:
    rate = "" if each.rate is None else f"{each.rate:g}{' (edge)' if each.edge else ''}"
    ratios = [shown(each.ratio), shown(each.beside)][: 1 + beside]
    if not each.complete:
        return [rate, "", *[""] * len(ratios), f"{len(each.records)} of {each.records.wanted} seeds", *[""] * 3]
    records = list(each.records.values())
    memory = records[0].get("memory", {})
    return [
        rate,
        "" if each.arrived is None else f"{each.arrived:.0f}",
        *ratios,
        f"{each.diverged} of {len(each.records)} diverged" if each.loss is None else _plus_minus(each.loss),
        "" if each.error is None else plus_minus(each.error),
        " + ".join(f"{memory[key]:.3g}" for key in ("weight copies", "optimizer numbers") if key in memory),
        _milliseconds(records),
    ]


def _plus_minus(loss: Interval) -> str:
    if loss.is_one_value:
        return f"{loss.mean:.4f} in every run"
    return f"{loss.mean:.4f} ± {loss.high - loss.mean:.4f}"


def _milliseconds(records: Sequence[Record]) -> str:
    quiet = [record for record in records if not record["noisy"]]
    taken = [record["seconds a step"]["cpu"] for record in quiet or records]
    return f"{'' if quiet else '~'}{1000 * statistics.median(taken):.0f}"


def _verdicts(study: Study, found: Mapping[str, Result]) -> str:
    cured = any(cell.uncured for cell in study.cells)
    text = (
        "## Verdicts\n\n"
        "*Sooner* and *later* only where intervals have no point in common. An interval without an upper end (>) "
        f"begins at the smallest ratio of {seeds_told(study)}, and has no level of 95 %.\n\n"
    )
    rows = [
        [each.cell.name, against_reference(each), *([against_uncured(each, found)] if cured else [])]
        for each in found.values()
        if each.cell.reference is not None
    ]
    return text + table(("cell", f"against {study.baseline}", *([f"against {study.plain}"] if cured else [])), rows)


def _cutoffs(study: Study, finished: Mapping[str, Record]) -> str:
    lines = ["Cut-offs, what every seed of each reference has reached:", ""]
    for cell in study.cells:
        if cell.reference is None:
            value = cutoff(study, finished, cell)
            step = f"step {cutoff_step(study, cell):g}"
            lines.append(f"- {cell.name}, by {step}: {'not known yet' if value is None else f'{value:.4f}'}")
    return "\n".join(lines) + "\n"


def _rates(study: Study, finished: Mapping[str, Record]) -> str:
    text = (
        "## The first rung\n\n"
        f"Validation loss {_first(study)}, at each rate; {extensions(study, finished)} runs extended "
        f"grids. {len(finished)} runs of at most {MOST_RUNS} in all.\n\n"
    )
    rows = []
    for cell in study.cells:
        tried = [(rate, finished.get(rung_run(cell, rate).key)) for rate in used_rates(cell, finished)]
        told = [f"{rate:g}: {_validation(record)}" for rate, record in tried if record is not None]
        rows.append([cell.name, "; ".join(told)])
    return text + table(("cell", "rates and losses"), rows)


def _validation(record: Record) -> str:
    return "diverged" if record["validation"] is None else f"{record['validation']:.4f}"


def _commands(study: Study, finished: Mapping[str, Record]) -> str:
    cell, data = study.cells[-1].name, " --data FOLDER" if study.needs_data else ""
    lines = [
        "## Commands and machine\n",
        "```text",
        "export OMP_NUM_THREADS=1; cd experiments/findings",
        f"python main.py {study.name}{data} --jobs 2   # goes on where it was",
        *([f"python main.py {study.name} --launch   # times, on a quiet machine; as root"] if study.launches else []),
        f"python main.py {study.name} --page   # this page alone",
        f'python main.py {study.name}{data} --again "{cell}"   # one cell anew',
        "```\n",
    ]
    for what, words in (("machine", map(_place, finished.values())), ("versions", map(_versions, finished.values()))):
        told = "; ".join(f"{name} ({count} runs)" for name, count in Counter(words).items())
        lines.append(f"- {what}: {told or 'none yet'}")
    seconds = sum(record["steps"] * record["seconds a step"]["cpu"] for record in finished.values())
    lines.append(f"- training took {seconds / 60:.0f} minutes of one core, evaluations left out")
    return "\n".join(lines) + "\n"


def _place(record: Record) -> str:
    where = record["machine"]
    return f"{where['processor']}, {where['cores']} cores, {where['threads']} thread a run"


def _versions(record: Record) -> str:
    of = record["versions"]
    return f"CPython {of['python']}, torch {of['torch']}, Stretto {of['stretto']} at {of['commit']}"
