"""What larger batches bring and take on a small network: see README.md in this folder.

OMP_NUM_THREADS=1 nice -n 10 python experiments/large_batch/main.py
"""

import argparse
import itertools
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from stretto import study
from stretto.analysis.batch_tradeoff import fit, positive_weights
from stretto.data import forever
from stretto.report import Record
from stretto.report.large_batches import BatchRuns, StepTime, arrivals, by_batch_size, noise_of, sharpness_of
from stretto.settings.runs import CompareSettings
from stretto.study.prepare import costs_of, prepare, resolve

HERE = Path(__file__).parent
COMMON = CompareSettings(
    model_options={"depth": 4, "width": 64},
    stages=1,
    examples=20_000,
    methods=("backprop",),
    batch_size=(16, 32, 64, 128, 256, 512, 1024),
    seeds=2,
    schedule="cosine",
    lr_warmup=0.1,
    measure=("sharpness", "noise"),
)
SGD, LARS, LAMB = (0.003, 0.01, 0.03), (0.3, 1.0, 3.0), (0.003, 0.01, 0.03)
NAIVE = replace(COMMON, optimizer="sgd", lr_warmup=0.0)
STUDIES = {
    "sgd, unscaled": replace(NAIVE, lr=(0.01, 0.03, 0.1)),
    "sgd, unscaled, equal updates": replace(
        NAIVE, lr=(0.03, 0.1), batch_size=(16, 64, 256, 1024), examples=None, steps=1250
    ),
    "sgd, linear": replace(COMMON, optimizer="sgd", lr=SGD, reference_batch=32, lr_scaling="linear"),
    "lars, sqrt": replace(COMMON, optimizer="lars", lr=LARS, reference_batch=32, lr_scaling="sqrt"),
    "lamb, sqrt": replace(COMMON, optimizer="lamb", lr=LAMB, reference_batch=32, lr_scaling="sqrt"),
}


def main() -> None:
    """Train what is not there yet, then print the tables and write result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="studies with their reports go here")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--quick", action="store_true", help="few examples, one seed, no result.json: does it run?")
    chosen = parser.parse_args()
    results = {}
    for name, settings in STUDIES.items():
        own = replace(settings, examples=2000, steps=None, seeds=1) if chosen.quick else settings
        folder = chosen.results / ("quick" if chosen.quick else "full") / name.replace(", ", "-")
        outcome = study.compare(study.open_study(own, folder), jobs=chosen.jobs)
        assert not outcome.failures, outcome.failures
        results[name] = {"settings": own.to_json(), **figures(outcome.records)}
        print(f"\n{name}\n\n{table(results[name])}", flush=True)
    throughput = {} if chosen.quick else utilisation(STUDIES["sgd, linear"])
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if not chosen.quick:
        content = {"machine": machine, "utilisation": throughput, "studies": results}
        chosen.out.write_text(json.dumps(content, indent=1) + "\n")


def utilisation(settings: CompareSettings, rounds: int = 60, steps: int = 5) -> dict[str, Any]:
    """Median step times with the batch sizes taking turns, so that all meet the same disturbances, and their line."""
    torch.set_num_threads(1)
    runs = {run.batch_size: prepare(run) for run in resolve(settings).runs() if run.batch_size is not None}
    data = {size: forever(each.dataset.train, size, seed=0) for size, each in runs.items()}
    seconds: dict[int, list[float]] = {size: [] for size in runs}
    for _ in range(rounds):
        for size, prepared in runs.items():
            batches = list(itertools.islice(data[size], steps))
            start = time.perf_counter()
            for x, y in batches:
                prepared.trainer.step(x, y)
            seconds[size].append((time.perf_counter() - start) / steps)
    medians = {size: median(each) for size, each in seconds.items()}
    line = StepTime(*(positive_weights([(1 / t, b / t) for b, t in medians.items()]) or (0.0, 1.0)))
    flops = {size: costs_of(prepared).total * size / medians[size] for size, prepared in runs.items()}
    print(f"\nA step takes {1e3 * line.fixed:.2f} ms + b {1e6 * line.per_example:.2f} us.\n\n"
          "| batch | examples/s | GFLOP/s | utilisation | of the fit |\n|---|---|---|---|---|")  # fmt: skip
    for b, t in medians.items():
        print(
            f"| {b} | {b / t:.0f} | {flops[b] / 1e9:.2f} | {b / t * line.per_example:.0%} | {line.utilisation(b):.0%} |"
        )
    return {"step_seconds": medians, "flop_per_second": flops, "fixed": line.fixed, "each": line.per_example}


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """What a study says about each batch size, at its best rate, and about all of them."""
    seen = by_batch_size(records)
    reached = arrivals(records)
    curve = None if reached is None else fit(list(reached[1]["backprop"].values()))
    return {
        "batches": [at_batch(each, records) for each in seen],
        "goal": None if reached is None else reached[0],
        "reached": None if reached is None else reached[1]["backprop"],
        "tradeoff": None if curve is None else {"min_steps": curve.min_steps, "min_examples": curve.min_examples,
                                                "critical_batch": curve.critical_batch},
    }  # fmt: skip


def at_batch(each: BatchRuns, records: Sequence[Record]) -> dict[str, Any]:
    """One batch size: what its runs at the best rate came to, and how many of all rates diverged."""
    own = [record for record in records if record.options["batch_size"] == each.batch]
    return {
        "batch": each.batch,
        "rate": each.tuned[0].options["lr"] if each.tuned else None,
        "test_accuracy": [run.test_accuracy for run in each.tuned],
        "train_loss": [run.train_loss for run in each.tuned],
        "at_one_rate": [run.test_accuracy for run in each.fixed],
        "sharpness": sharpness_of(each.tuned),
        "sharpness_at_one_rate": sharpness_of(each.fixed),
        "noise_scale": {f"{part}": noise_of(each.tuned, part) for part in (0.25, 0.5, 0.75, 1)},
        "diverged": sum(run.diverged for run in own) / len(own),
    }


def table(result: dict[str, Any]) -> str:
    """One row a batch size."""
    heads = ["batch", "best rate", "test acc. %", "at one rate", "train loss", "sharpness",
             "noise scale at 1/4, 1/2", "diverged"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in result["batches"]:
        scales = [each["noise_scale"][part] for part in ("0.25", "0.5")]
        noise = ", ".join("lost" if scale is None else f"{scale:.0f}" for scale in scales)
        cells = [f"{each['batch']}", f"{each['rate']}", percent(each["test_accuracy"]), percent(each["at_one_rate"]),
                 mean(each["train_loss"], ".4f"), mean(each["sharpness"], ".1f"), noise,
                 f"{each['diverged']:.0%}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    curve = result["tradeoff"]
    if curve is not None:
        lines.append(f"\nTo train loss {result['goal']}: critical batch {curve['critical_batch']:.0f}, at least "
                     f"{curve['min_steps']:.0f} steps, {curve['min_examples']:.0f} examples.")  # fmt: skip
    return "\n".join(lines)


def mean(values: list[float], form: str) -> str:
    """The mean over seeds."""
    return format(fmean(values), form) if values else "none"


def percent(values: list[float]) -> str:
    """The mean over seeds, and half the distance between the best and the worst."""
    if not values:
        return "none"
    return f"{100 * fmean(values):.1f} ±{50 * (max(values) - min(values)):.1f}"


if __name__ == "__main__":
    main()
