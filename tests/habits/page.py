"""Writes the table of docs/guide/your-model.md from what becomes of each habit: python tests/habits/page.py."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from habits.judge import METHODS, verdict
from habits.networks import FORWARD, HABITS, HOOKS, INPUTS, LOSSES, MODULES, OUTPUTS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "your-model.md"
BEGIN, END = "<!-- habits -->\n", "<!-- end of habits -->\n"
TITLES = {
    "In the forward": FORWARD, "Modules and weights": MODULES, "Hooks": HOOKS, "What the forward returns": OUTPUTS,
    "What it takes": INPUTS, "Losses": LOSSES,
}  # fmt: skip


def answer(habit):
    """What becomes of a habit."""
    refused = [method for method in METHODS if verdict(frozenset([habit]), method).kind != "equal"]
    if not refused:
        return "plain numbers"
    if refused == [*METHODS]:
        return "refused"
    if refused == [method for method, pieces in METHODS.items() if pieces > 1]:
        return "plain numbers; refused with several micro-batches"
    return f"plain numbers; refused under {', '.join(method.partition('(')[0] for method in refused)}"


def table(answers):
    """The table, from answers by habit."""
    lines = []
    for title, habits in TITLES.items():
        lines += [f"| {title} | answer |", "|---|---|", *(f"| {habit} | {answers[habit]} |" for habit in habits), ""]
    return "\n".join(lines)


def written():
    """The answers that the page gives, by habit."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2 and row[0].strip() in HABITS}


def main():
    """Write the page's table anew."""
    warnings.simplefilter("ignore")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n" + table({habit: answer(habit) for habit in HABITS}) + "\n" + END + after)


if __name__ == "__main__":
    main()
