"""A study's page, made of its store alone."""

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.cells import MOST_RUNS, Record, Study
from harness.figure import figure
from harness.halving import extensions, rung_run, runs_left, used_rates
from harness.intervals import Interval
from harness.results import Result, against_reference, against_uncured, cutoff, cutoff_step, judged, outcome, result
from stretto.files.destinations import write_whole

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


def wrapped(text: str) -> str:
    """Markdown with its long lines broken, but for tables, headings and code."""
    lines, code = [], False
    for line in text.split("\n"):
        code ^= line.startswith("```")
        plain = not code and not line.startswith(("|", "#", "!", "```"))
        indent = "  " if line.startswith("- ") else ""
        broken = textwrap.wrap(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += broken if plain and broken else [line]
    return "\n".join(lines)


def _claims(study: Study, found: Mapping[str, Result]) -> str:
    if not study.claims:
        return ""
    lines = [
        "## Figures to reach\n",
        "| figure | verdict | lowest cell | its value |",
        "|---|---|---|---|",
    ]
    for claim in study.claims:
        best, value, _ = judged(claim, found)[0]
        lines.append(f"| {claim.text} | **{outcome(claim, found)}** | {best.cell.name} | {_shown(value, claim.kind)} |")
    return "\n".join(lines) + "\n"


def _shown(value: Interval | None, kind: str) -> str:
    if value is None:
        return "not known yet"
    return f"{value}" if kind == "ratio" else f"{value} %"


def _results(study: Study, found: Iterable[Result]) -> str:
    beside = any(cell.beside for cell in study.cells)
    lines = [
        "## Every cell\n",
        "Means of three seeds at the best rate, with the 95 % interval of the rules. *Ratio*: steps to the cut-off "
        f"over those of the same optimizer with {study.baseline}"
        f"{'; *beside*: over those of the optimizer that is not rotated' if beside else ''}. "
        "Memory in numbers for each parameter: copies of the weights + the optimizer's. ms a step is CPU time in "
        "emulation; ~ marks a machine that was not quiet.\n",
        f"| cell | method | best rate | steps | ratio |{' beside |' if beside else ''} last test loss | test error, % "
        "| memory | ms |",
        f"|---|---|---|---|---|{'---|' if beside else ''}---|---|---|---|",
    ]
    for each in found:
        told = _cells(each)
        told = told if beside else told[:3] + told[4:]
        lines.append(f"| {each.cell.name} | `{each.cell.method}` | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def _cells(each: Result) -> list[str]:
    if not each.complete:
        return [_rate(each), *[""] * 3, f"{len(each.records)} of 3 seeds", *[""] * 3]
    records = list(each.records.values())
    arrived = "" if each.arrived is None else f"{each.arrived:.0f}"
    error = (
        "" if each.error is None else f"{100 * each.error.mean:.1f} ± {100 * (each.error.high - each.error.mean):.1f}"
    )
    memory = records[0].get("memory", {})
    numbers = [f"{memory[key]:.3g}" for key in ("weight copies", "optimizer numbers") if key in memory]
    return [
        _rate(each),
        arrived,
        "" if each.ratio is None else str(each.ratio),
        "" if each.beside is None else str(each.beside),
        f"{each.diverged} of 3 diverged" if each.loss is None else _plus(each.loss),
        error,
        " + ".join(numbers),
        _milliseconds(records),
    ]


def _rate(each: Result) -> str:
    return "" if each.rate is None else f"{each.rate:g}{' (edge)' if each.edge else ''}"


def _plus(value: Interval) -> str:
    return f"{value.mean:.4f} ± {value.high - value.mean:.4f}"


def _milliseconds(records: Sequence[Record]) -> str:
    quiet = [record for record in records if not record["noisy"]]
    taken = [record["seconds a step"]["cpu"] for record in quiet or records]
    return f"{'' if quiet else '~'}{1000 * statistics.median(taken):.0f}"


def _verdicts(study: Study, found: Mapping[str, Result]) -> str:
    cured = any(cell.uncured for cell in study.cells)
    lines = [
        "## Verdicts\n",
        "*Sooner* and *later* only where intervals have no point in common. An interval without an upper end (>) "
        "begins at the smallest ratio of three seeds, and has no level of 95 %.\n",
        f"| cell | against {study.baseline} |{f' against {study.plain} |' if cured else ''}",
        f"|---|---|{'---|' if cured else ''}",
    ]
    lines += [
        f"| {each.cell.name} | {against_reference(each)} |{f' {against_uncured(each, found)} |' if cured else ''}"
        for each in found.values()
        if each.cell.reference is not None
    ]
    return "\n".join(lines) + "\n"


def _cutoffs(study: Study, finished: Mapping[str, Record]) -> str:
    lines = [f"Cut-offs, the mean test {study.metric} of each reference:", ""]
    for cell in study.cells:
        if cell.reference is None:
            value = cutoff(study, finished, cell)
            step = f"at step {cutoff_step(study, cell):g}"
            lines.append(f"- {cell.name}, {step}: {'not known yet' if value is None else f'{value:.4f}'}")
    return "\n".join(lines) + "\n"


def _rates(study: Study, finished: Mapping[str, Record]) -> str:
    lines = [
        "## The first rung\n",
        f"Validation loss after half of the steps, seed 0, at each rate; {extensions(study, finished)} runs extended "
        f"grids. {len(finished)} runs of at most {MOST_RUNS} in all.\n",
        "| cell | rates and losses |",
        "|---|---|",
    ]
    for cell in study.cells:
        tried = [(rate, finished.get(rung_run(cell, rate).key)) for rate in used_rates(cell, finished)]
        told = [f"{rate:g}: {_validation(record)}" for rate, record in tried if record is not None]
        lines.append(f"| {cell.name} | {'; '.join(told)} |")
    return "\n".join(lines) + "\n"


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
    for what, words in (("machine", _places(finished)), ("versions", _versions(finished))):
        lines.append(
            f"- {what}: " + ("; ".join(f"{name} ({count} runs)" for name, count in words.items()) or "none yet")
        )
    seconds = sum(record["steps"] * record["seconds a step"]["cpu"] for record in finished.values())
    lines.append(f"- training took {seconds / 60:.0f} minutes of one core, evaluations left out")
    return "\n".join(lines) + "\n"


def _places(finished: Mapping[str, Record]) -> Counter[str]:
    return Counter(
        f"{each['processor']}, {each['cores']} cores, {each['threads']} thread a run"
        for each in (record["machine"] for record in finished.values())
    )


def _versions(finished: Mapping[str, Record]) -> Counter[str]:
    return Counter(
        f"CPython {each['python']}, torch {each['torch']}, Stretto {each['stretto']} at {each['commit']}"
        for each in (record["versions"] for record in finished.values())
    )
