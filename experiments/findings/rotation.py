"""Study 9, rotation: are ratios of steps under delay the same at equal rates, in a long training? See rules.md."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from depth import BATCH, CONTEXT, WINDOWS, Block, Embedding, Unembedding
from harness import Cell, Claim, Study, held_out, measured_training, shuffled
from harness.cells import Record
from harness.end_tables import shown
from harness.examples import text
from harness.markdown import table
from harness.results import TEST, cut_at, finals, ratio_at
from torch import nn

import stretto
from stretto.losses import token_cross_entropy
from stretto.optim import muon, warmup

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 9 / 10)  # of the steps without delay
BLOCKS, APART, STEPS, EVERY, WARMUP = 8, 4, 6000, 100, 300
DEEP = BLOCKS * APART  # stages, of which those between two blocks hand on what they get
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.01),
    "Muon": partial(muon, momentum=0.95, weight_decay=0.01),
}
RATES = {"AdamW": (0.0005, 0.001, 0.002), "Muon": (0.001, 0.003, 0.009)}


def network(vocabulary: int, stages: int, seed: int) -> list[nn.Module]:
    """Study 1's decoder with eight blocks on 1, 2 or 32 stages; the weights depend on the seed alone.

    On 32 stages a block begins every fourth one and the readout is the last one, so that delays of asynchronous 1F1B
    are 31, 27, ..., 3 and 0; the other stages have no weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [Embedding(vocabulary), *(Block(BLOCKS) for _ in range(BLOCKS)), Unembedding(vocabulary)]
    if stages < DEEP:
        each = BLOCKS // stages
        return stretto.split(layers, [0, *(1 + each * s for s in range(1, stages)), len(layers)])
    held = {0: nn.Sequential(*layers[:2]), DEEP - 1: layers[-1]}
    held |= {APART * n: layers[1 + n] for n in range(1, BLOCKS)}
    return [held.get(s, nn.Identity()) for s in range(DEEP)]


def train(cell: Cell, rate: float, seed: int, steps: int, path: str | None) -> dict[str, Any]:
    """One run: a warm-up, then a constant rate; nothing is clipped."""
    data = text(path, CONTEXT)
    trainer = stretto.Trainer(
        network(data.num_classes, cell.settings["stages"], seed), token_cross_entropy,
        partial(OPTIMIZERS[cell.optimizer], lr=rate), cell.method, device="cpu", workers=1, seed=seed,
        scheduler=warmup(WARMUP),
    )  # fmt: skip
    return measured_training(trainer, shuffled(data.train, BATCH, seed), steps, EVERY, held_out(data, WINDOWS))


def cells() -> tuple[Cell, ...]:
    """Every optimizer, rate and method; a rate is part of a cell's name."""
    kinds = (
        ("AdamW", "none", "backprop", 1),
        ("AdamW", "stash", "pipedream", DEEP),
        ("AdamW, rotated", "none", "pipedream(rotate=True)", 1),
        ("AdamW, rotated", "stash", "pipedream(rotate=True)", DEEP),
        ("Muon", "none", "backprop", 1),
        ("Muon", "2BW", "pipedream-2bw", 2),
        ("Muon", "2BW, feedback 1", "pipedream-2bw(feedback=1)", 2),
    )
    made = []
    for name, cure, method, stages in kinds:
        optimizer = name.removesuffix(", rotated")
        for rate in RATES[optimizer]:
            against: dict[str, str] = {} if cure == "none" else {"reference": f"{name}, {rate:g}, none"}
            if cure == "stash" and name != optimizer:
                against["beside"] = f"{optimizer}, {rate:g}, none"
            settings = {"stages": stages, "advises": False}
            made.append(Cell(f"{name}, {rate:g}, {cure}", method, optimizer, (rate,), STEPS, settings, **against))
    return tuple(made)


def more(finished: Mapping[str, Record]) -> str:
    """The ratio of steps at each of five losses, by rate."""
    text = (
        "## Loss by loss\n\n"
        "Steps of the delayed cell over those of the same optimizer without delay at the same rate, to the test loss "
        "that every seed of the latter has reached by so much of its 6,000 steps; below it, the loss.\n\n"
    )
    found, rows = finals(ALL, finished), []
    for cell in ALL:
        mine, theirs = found.get(cell.name), found.get(cell.reference or "")
        if cell.reference is None:
            continue
        cuts = [cut_at(theirs, TEST, share) for share in SHARES]
        told = ["" if cut is None else f"{shown(ratio_at(mine, theirs, TEST, cut))} ({cut:.2f})" for cut in cuts]
        rows.append([cell.name, *told])
    return text + table(("cell", *(f"{100 * share:.3g} %" for share in SHARES)), rows)


ALL = cells()
STUDY = Study(
    name="rotation",
    title="Rotation: does it keep up at small equal rates, in a long training?",
    question=(
        "How many times the steps of training without delay does a pipeline of the delays of 32 stages need to each "
        "loss, with and without rotation, where all have the same rate? And a delay of one update under Muon?"
    ),
    cells=ALL,
    train=train,
    horizon=STEPS,
    more=more,
    claims=(
        Claim(
            "Rotated AdamW with the delays of 32 stages: at most 1.3 times its own steps without delay, at equal rates",
            "ratio",
            tuple(f"AdamW, rotated, {rate:g}, stash" for rate in RATES["AdamW"]),
            1.3,
        ),
    ),
    setting=(
        "Study 1's decoder with 8 blocks (width 32, two heads) on the bytes of PostgreSQL's manual, context 32, "
        "batches of 16, 6,000 steps at constant rates behind a warm-up of 300, nothing clipped: "
        "[rules](../../rules.md), study 9. The data is a folder with `train.txt`, `validation.txt` and `test.txt`."
    ),
    tried=("A pilot measured speed alone, of 60 steps each: 16 to 39 ms a step.",),
)
