"""Feedback and rotation against delay on a small language model of 16 stages: see README.md in this folder.

OMP_NUM_THREADS=1 python experiments/delay_language/main.py [--jobs 2] [--out result.json]
"""

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.data import load
from stretto.methods import Method
from stretto.methods.cure import Cure
from stretto.models.transformer import language_model

HERE = Path(__file__).parent
STAGES, WIDTH, HEADS, CONTEXT, BATCH, UPDATES, SEED = 16, 32, 2, 32, 16, 300, 0
RATES = (0.001, 0.002, 0.004, 0.008)
LAST = 30  # updates whose mean loss is the training loss


def part_of_delay(part: float) -> Method:
    """PipeDream whose stages have a part of their delay as feedback."""
    chosen = stretto.method("pipedream")
    return Method(
        name=f"pipedream, c = {part:g} D", summary="", schedule=chosen.schedule, synchronous=False, weights="stash",
        cure=Cure(feedback=lambda place: part * place.delay),
    )  # fmt: skip


METHODS: dict[str, Any] = {
    "no delay": "backprop",
    "pipedream": "pipedream",
    "c = 1": "pipedream(feedback=1)",
    "c = D / 8": partial(part_of_delay, 1 / 8),
    "c = D / 2": partial(part_of_delay, 1 / 2),
    "c = D": "pipedream(feedback=delay)",
    "rotated, one-sided": "pipedream(rotate=one-sided)",
    "rotated": "pipedream(rotate=True)",
    "rotated, c = 1": "pipedream(rotate=True, feedback=1)",
    "rotated, no delay": partial(stretto.method, "pipedream(rotate=True, finish=1)"),
}


def rate_at(update: int) -> float:
    """A warm-up over the first twentieth, then half a cosine down to a tenth."""
    start = UPDATES // 20
    if update < start:
        return (update + 1) / start
    done = (update - start) / (UPDATES - start)
    return 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens, output [N, T, V]."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def train(case: tuple[str, float]) -> dict[str, Any]:
    """One run: its training loss, and the test loss of both iterates."""
    name, rate = case
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data = load("pydoc", context=CONTEXT)
    recipe = language_model(data.num_classes, CONTEXT, depth=STAGES - 2, width=WIDTH, heads=HEADS)
    made = METHODS[name]
    trainer = stretto.Trainer(
        list(recipe), stretto.mean(loss), partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.99), fused=True),
        made if isinstance(made, str) else made(), device="cpu", workers=1, seed=SEED, clip=1.0,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at),
    )  # fmt: skip
    order = torch.randperm(len(data.train.x), generator=torch.Generator().manual_seed(SEED))
    losses, start = [], time.perf_counter()
    for update in range(UPDATES):
        picked = order[torch.arange(update * BATCH, (update + 1) * BATCH) % len(order)]
        losses.append(trainer.step(data.train.x[picked], data.train.y[picked]))
    told = [each for each in losses if each is not None] + trainer.flush()
    test = [(data.test.x[i : i + 64], data.test.y[i : i + 64]) for i in range(0, 512, 64)]
    ahead = trainer.evaluate(test)["loss"]
    with trainer.plain_sums():
        summed = trainer.evaluate(test)["loss"]
    return {
        "method": name, "rate": rate, "training": sum(told[-LAST:]) / LAST, "test": ahead, "test, plain sums": summed,
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """Each method at its best rate, and the training loss at all of them."""
    lines = [
        f"| | best rate | training | test | test, plain sums | {' | '.join(f'{rate:g}' for rate in RATES)} |",
        "|---|---|---|---|---|" + "---|" * len(RATES),
    ]
    for name in METHODS:
        mine = {run["rate"]: run for run in runs if run["method"] == name}
        if not mine:
            continue
        best = min(mine.values(), key=lambda run: run["training"] if math.isfinite(run["training"]) else math.inf)
        figures = [f"{best[key]:.3f}" for key in ("training", "test", "test, plain sums")]
        all_rates = [f"{mine[rate]['training']:.3f}" if rate in mine else "" for rate in RATES]
        lines.append(f"| {name} | {best['rate']:g} | {' | '.join(figures)} | {' | '.join(all_rates)} |")
    return "\n".join(lines)


def main() -> None:
    """Train all cases that the file does not have, write what each comes to, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    chosen = parser.parse_args()
    runs = json.loads(chosen.out.read_text(encoding="utf-8")) if chosen.out.exists() else []
    known = {(run["method"], run["rate"]) for run in runs}
    cases = [(name, rate) for name in chosen.methods for rate in chosen.rates if (name, rate) not in known]
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for run in pool.map(train, cases):
            runs.append(run)
            chosen.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    main()
