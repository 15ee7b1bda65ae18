"""Writes the table of docs/guide/your-model.md from what becomes of each habit: python tests/habits/page.py."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from habits.judge import METHODS, judged, verdict
from habits.loaders import LOADERS
from habits.networks import FORWARD, HOOKS, INPUTS, LOSSES, MODULES, OUTPUTS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "your-model.md"
BEGIN, END = "<!-- habits -->\n", "<!-- end of habits -->\n"
TITLES = {
    "In the forward": FORWARD, "Modules and weights": MODULES, "Hooks": HOOKS, "What the forward returns": OUTPUTS,
    "What it takes": INPUTS, "Losses": LOSSES, "What fit is given": LOADERS,
}  # fmt: skip
EVERY = [habit for habits in TITLES.values() for habit in habits]
KINDS = {
    "with several micro-batches": {method for method, loop in METHODS.items() if loop.pieces > 1},
    "under asynchronous methods": {method for method, loop in METHODS.items() if loop.versions is not None},
    "under local methods": {method for method, loop in METHODS.items() if loop.segments is not None},
}


def answer(habit):
    """What becomes of a habit, or of a loader."""
    tried = [method for method in METHODS if judged({habit}, method)]
    case = {"habits": frozenset(), "way": "fit", "load": habit} if habit in LOADERS else {"habits": frozenset([habit])}
    refused = {method for method in tried if verdict(method=method, **case).kind != "equal"}
    if not refused:
        return "plain numbers"
    if len(refused) == len(tried):
        return "refused"
    kinds = [kind for kind, methods in KINDS.items() if (methods & {*tried}) and (methods & {*tried}) <= refused]
    left = refused.difference(*(KINDS[kind] for kind in kinds))
    alone = [f"under {', '.join(method.partition('(')[0] for method in METHODS if method in left)}"] * bool(left)
    return f"plain numbers; refused {', '.join(kinds + alone)}"


def table(answers):
    """The table, from answers by habit."""
    lines = []
    for title, habits in TITLES.items():
        lines += [f"| {title} | answer |", "|---|---|", *(f"| {habit} | {answers[habit]} |" for habit in habits), ""]
    return "\n".join(lines)


def written():
    """The answers that the page gives, by habit."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2 and row[0].strip() in EVERY}


def main():
    """Write the page's table anew."""
    warnings.simplefilter("ignore")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n" + table({habit: answer(habit) for habit in EVERY}) + "\n" + END + after)


if __name__ == "__main__":
    main()
