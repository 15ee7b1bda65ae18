"""Writes the tables of docs/guide/your-model.md, of habits and of networks: python tests/habits/page.py."""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import stretto
from habits import whole_networks
from habits.judge import METHODS, judged, verdict
from habits.loaders import LOADERS
from habits.networks import FORWARD, HOOKS, INPUTS, LOSSES, MODULES, OUTPUTS

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "your-model.md"
BEGIN, END = "<!-- habits -->\n", "<!-- end of habits -->\n"
NETWORKS = {
    "torch": "torch's own layers, as tutorials use them",
    "images": "Image networks in the style of torchvision and timm",
    "transformers": "Architectures of transformers",
}
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


def answer_of_network(name):
    """What becomes of a network, in two stages."""
    trained = whole_networks.Trained(whole_networks.case_of(name), 2)
    kinds = {trained.verdict(method).kind for method in whole_networks.methods_of(name)}
    return {frozenset(["equal"]): "plain numbers", frozenset(["refused"]): "refused"}[frozenset(kinds)]


def cut_between(name):
    """What two stages of a network are cut between."""
    case = whole_networks.case_of(name)
    try:
        noun = stretto.split(case.build(), 2, example=case.batches(1, 6)[0][0]).explanation.split()[1]
    except stretto.UsageError:
        return "-"
    return "operations" if noun == "pieces" else noun


def table(answers, cuts):
    """The tables, from answers by habit and network, and what networks are cut between."""
    lines = []
    for title, habits in TITLES.items():
        lines += [f"| {title} | answer |", "|---|---|", *(f"| {habit} | {answers[habit]} |" for habit in habits), ""]
    for origin, title in NETWORKS.items():
        names = [name for name in whole_networks.NAMES if name.startswith(f"{origin}: ")]
        rows = (f"| {name.partition(': ')[2]} | {cuts[name]} | {answers[name]} |" for name in names)
        lines += [f"| {title} | cut between | answer |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def written(column="answer"):
    """What the page gives, by habit and network: the answer, or what networks are cut between, "cut"."""
    found, origin = {}, ""
    for line in PAGE.read_text().partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        origin = next((each for each, title in NETWORKS.items() if title == cells[0]), origin)
        if len(cells) == 2 and cells[0] in EVERY:
            found[cells[0]] = cells[1]
        elif len(cells) == 3 and f"{origin}: {cells[0]}" in whole_networks.NAMES:
            found[f"{origin}: {cells[0]}"] = cells[2 if column == "answer" else 1]
    return found


def main():
    """Write the page's tables anew."""
    warnings.simplefilter("ignore")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    answers = {habit: answer(habit) for habit in EVERY}
    answers |= {name: answer_of_network(name) for name in whole_networks.NAMES}
    cuts = {name: cut_between(name) for name in whole_networks.NAMES}
    PAGE.write_text(before + BEGIN + "\n" + table(answers, cuts) + "\n" + END + after)


if __name__ == "__main__":
    main()
