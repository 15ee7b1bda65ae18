"""Study 11: the advice by time, tried once on three networks and two data sets that had no part in it. See rules.md.

Run it once, when studies 7 to 9 have their say in `findings.json`.
"""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from harness import Cell, Study, held_out, measured_training, shuffled
from harness.cells import Record
from harness.end_tables import shown
from harness.halving import final_records
from harness.markdown import table
from harness.results import TEST, complete, cutoff, ratio_at, scaled
from sections.chunk_tables import CLUSTER, seconds_a_step
from sections.trial_networks import mixer, recurrent, separable
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto.data import Dataset, load
from stretto.losses import token_cross_entropy
from stretto.optim import muon

STEPS, HORIZON, EVERY, HELD, STAGES = 600, 400, 25, 512, 8
BATCH = {"mixer": 64, "recurrent": 16, "separable": 32}
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.01),
    "Muon": partial(muon, momentum=0.95, weight_decay=0.01),
}
RATES = {"AdamW": (0.001, 0.003, 0.01, 0.03), "Muon": (0.001, 0.003, 0.009, 0.027)}
LATER = 1.1  # times the time of 1f1b
CELLS = (
    ("mixer", "local", "AdamW", 8, None),
    ("mixer", "local", "AdamW", 4, "100Mbit"),
    ("mixer", "async", "Muon", 8, None),
    ("mixer", "async", "Muon", 4, "100Mbit"),
    ("recurrent", "local", "AdamW", 8, None),
    ("recurrent", "local", "AdamW", 4, "100Mbit"),
    ("recurrent", "async", "Muon", 8, None),
    ("separable", "local", "AdamW", 8, None),
    ("separable", "local", "AdamW", 4, "100Mbit"),
    ("separable", "local", "AdamW", 8, "100Mbit"),
)
"""Network, word, optimizer, workers, links between machines of one worker each, or None for one machine."""
HEAD = {"mixer": "sequence"}  # what the refusal names where none can be chosen
PLAIN = {"local": "AdamW", "async": "Muon"}


@cache
def data_of(network: str, path: str | None) -> Dataset:
    """Fashion-MNIST from the folder, or the text that comes with Python."""
    if network == "recurrent":
        return load("pydoc", context=64)
    return load("fashion-mnist") if path is None else load("fashion-mnist", path=path)


def stages_of(network: str, data: Dataset, seed: int) -> list[nn.Module]:
    """The network in eight stages."""
    if network == "recurrent":
        return recurrent(seed, data.num_classes)
    return mixer(seed) if network == "mixer" else separable(seed)


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run of a cell, and what its method's name stood for."""
    network = cell.settings["network"]
    data = data_of(network, path)
    batch = shuffled(data.train, BATCH[network], seed)
    trainer = stretto.Trainer(
        stages_of(network, data, seed), token_cross_entropy if network == "recurrent" else cross_entropy,
        partial(OPTIMIZERS[cell.optimizer], lr=rate), cell.method, example=batch(0)[0], device="cpu", workers=1,
        seed=seed, clip=1.0,
    )  # fmt: skip
    measured = measured_training(trainer, batch, steps, EVERY, held_out(data, HELD))
    return {**measured, "resolved": str(trainer.method)}


def cells() -> tuple[Cell, ...]:
    """Of each network: plain training under both optimizers, and both words."""
    made = []
    for network in BATCH:
        for word, optimizer in PLAIN.items():
            if (network, word) not in {cell[:2] for cell in CELLS}:
                continue  # convolutions have no matrix for Muon
            settings = {"network": network, "stages": STAGES}
            plain = f"{network}, {optimizer}, plain"
            made.append(Cell(plain, "backprop", optimizer, RATES[optimizer], STEPS, settings))
            name = f"{network}, {optimizer}, {word}"
            method = f"local(head={HEAD[network]})" if word == "local" and network in HEAD else word
            made.append(Cell(name, method, optimizer, RATES[optimizer], STEPS, settings, reference=plain))
    return tuple(made)


def more(finished: Mapping[str, Record]) -> str:
    """The ten cells by simulated time."""
    text = (
        "## By simulated time\n\n"
        "Time to the test loss that every seed of plain training has reached by 90 % of 400 steps, over that of `1f1b` "
        f"on as many workers: steps seed by seed, times the simulated time of a step. *Held*: at most {LATER} in the "
        "mean.\n\n"
    )
    if not CLUSTER.is_file():
        return f"{text}Not measured yet.\n"
    rows, held = [], 0
    for network, word, optimizer, workers, link in CELLS:
        cell, plain = (STUDY.cell(f"{network}, {optimizer}, {what}") for what in (word, "plain"))
        mine, theirs = final_records(cell, finished), final_records(plain, finished)
        where = [network, f"`{word}`", optimizer, f"{workers}", link or "one machine"]
        if not (complete(mine) and complete(theirs)):
            rows.append([*where, "", "", "", "", "open"])
            continue
        named = next(iter(mine.values()))["resolved"]
        kind = {"batch": BATCH[network], "optimizer": optimizer.lower()}
        seconds = [seconds_a_step(network, method, workers, link, **kind) for method in (named, "1f1b")]
        steps = ratio_at(mine, theirs, TEST, cutoff(STUDY, finished, plain))
        over = scaled(steps, seconds[0] / seconds[1])
        good = over is not None and over.mean <= LATER
        held += good
        rows.append([*where, f"`{named}`", shown(steps), f"{seconds[0] / seconds[1]:.2f}", shown(over),
                     "held" if good else "later"])  # fmt: skip
    head = ("network", "word", "optimizer", "workers", "links", "stood for", "steps", "a step", "time", "at most 1.1")
    return f"{text}{held} of {len(CELLS)} held.\n\n{table(head, rows)}"


ALL = cells()
STUDY = Study(
    name="advice_trial",
    title="The advice by time, on what had no part in it",
    question='Is a network that takes `method="local"` or `"async"` ever more than 10 % later than under `1f1b`?',
    cells=ALL,
    train=train,
    horizon=HORIZON,
    baseline="backprop",
    more=more,
    setting=(
        "An MLP-Mixer and residual separable convolutions on Fashion-MNIST, residual LSTMs on the text that comes with "
        "Python, eight blocks each in eight stages, gradients clipped to 1: [rules](../../rules.md), study 11. The "
        "data is the folder of Fashion-MNIST."
    ),
)
