"""Study 8, panels: figures 3 and 8 of Laskin, Metz et al. 2020 by width and batch, with power. See rules.md."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from harness import Cell, Study, held_out, measured_training, shuffled
from harness.cells import Record
from harness.counted import compute
from harness.end_tables import shown
from harness.examples import made_up
from harness.intervals import compared
from harness.markdown import table
from harness.results import ratio_to, scaled
from local_updates import SGD_RATES, images, mlp
from torch.nn.functional import cross_entropy

import stretto

STEPS, FIRST, EVERY = 600, 150, 25
PANELS = ((64, (32, 1024)), (256, (32, 256, 1024)), (1024, (32, 256, 1024)), (4096, (64,)))
WIDEST, FIXED = 4096, (0.003,)  # the width that has one rate
METHODS = {"backprop": "backprop", "2 chunks": "chunked(chunks=2)", "greedy": "greedy"}
TESTED, SMALL, EXAMPLES = 1000, 32, 2
IMAGE, CLASSES = (1, 28, 28), 10


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run: study 3's MLP of eight layers on MNIST."""
    data = images(path)
    batch = shuffled(data.train, cell.settings["batch"], seed)
    trainer = stretto.Trainer(
        mlp(data, seed, cell.settings["width"]), cross_entropy, partial(torch.optim.SGD, lr=rate, momentum=0.9),
        cell.method, example=batch(0)[0], device="cpu", seed=seed,
    )  # fmt: skip
    return measured_training(trainer, batch, steps, EVERY, held_out(data, TESTED))


def cells() -> tuple[Cell, ...]:
    """Every method in every panel, each against the panel's backprop."""
    return tuple(
        Cell(
            f"width {width}, batches of {batch}, {name}", method, "SGD", FIXED if width == WIDEST else SGD_RATES, STEPS,
            {"width": width, "batch": batch, "stages": 8},
            reference=None if name == "backprop" else f"width {width}, batches of {batch}, backprop",
            first=None if width == WIDEST else FIRST,
        )
        for width, batches in PANELS
        for batch in batches
        for name, method in METHODS.items()
    )  # fmt: skip


def more(finished: Mapping[str, Record]) -> str:
    """Steps and serial compute by width and batch, and whether large batches gain."""
    text = (
        "## Serial compute by batch\n\n"
        "To the training loss that every seed of backprop has reached by step 300, over backprop's: steps, and serial "
        "compute (steps times the time of a step in the long run with FLOPs as seconds, a worker for each layer). "
        f"*Beside batches of {SMALL}*: less where the whole interval lies below that of the same method and width in "
        "small batches.\n\n"
    )
    rows = []
    for width, batches in PANELS:
        serial = {name: serial_compute(width, method) for name, method in METHODS.items()}
        for name in ("2 chunks", "greedy"):
            factor, small = serial[name] / serial["backprop"], None
            for batch in batches:
                mine, theirs = (STUDY.cell(f"width {width}, batches of {batch}, {each}") for each in (name, "backprop"))
                steps = ratio_to(STUDY, finished, mine, theirs)
                found = scaled(steps, factor)
                verdict = "" if batch == SMALL or small is None else compared(found, small)
                small = found if batch == SMALL else small
                rows.append([f"{width}", f"{batch}", name, shown(steps), shown(found), verdict])
    head = ("width", "batch", "method", "steps", "serial compute", f"beside batches of {SMALL}")
    return text + table(head, rows)


def serial_compute(width: int, method: str) -> float:
    """The FLOPs that a step takes in the long run where every layer has a worker, heads included, for one example."""
    data = made_up(IMAGE, CLASSES)
    x, y = data.train.first(EXAMPLES)
    trainer = stretto.Trainer(
        mlp(data, 0, width), cross_entropy, partial(torch.optim.SGD, lr=0.1), method, example=x, device="cpu"
    )
    return compute(trainer, x, y)["serial"]


STUDY = Study(
    name="panels",
    title="The paper's panels by width and batch",
    question="Are local updates particularly effective in the high-compute regime, that is with large batches?",
    cells=cells(),
    train=train,
    horizon=STEPS,
    share=0.5,
    metric="training",
    baseline="backprop",
    more=more,
    setting=(
        "An MLP of 8 layers on 10,000 images of MNIST, SGD with momentum 0.9 at constant rates, 600 steps: "
        "[rules](../../rules.md), study 8. The data is a folder with MNIST's four files."
    ),
    tried=("A pilot measured speed alone, of 3 steps each: 4 ms to 1.9 s a step.",),
)
