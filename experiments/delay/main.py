"""Which cure for delay keeps a twenty-stage network training: see README.md in this folder.

OMP_NUM_THREADS=1 nice -n 10 python experiments/delay/main.py
"""

import argparse
import json
import multiprocessing
import platform
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from check import check
from runs import RATES, Run, all_runs, train

HERE = Path(__file__).parent


def main() -> None:
    """Train what is not there yet, then print the table and write result.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="runs that are finished stay here")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--quick", action="store_true", help="one epoch, one seed, no result.json: does it run?")
    parser.add_argument("--check", action="store_true", help="hold networks side by side against networks alone")
    chosen = parser.parse_args()
    if chosen.check:
        check(all_runs())
        return
    runs = [replace(run, seeds=(0,), epochs=1) if chosen.quick else run for run in all_runs()]
    folder = chosen.results / ("quick" if chosen.quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    left = [run for run in runs if not finished(folder, run)]
    print(f"{len(runs)} runs, {len(runs) - len(left)} of them finished before", flush=True)
    with ProcessPoolExecutor(chosen.processes, multiprocessing.get_context("spawn")) as pool:
        for done, future in enumerate(as_completed(pool.submit(finish, folder, run) for run in left), start=1):
            print(f"[{len(runs) - len(left) + done}/{len(runs)}] {future.result()}", flush=True)
    results = [json.loads(path_of(folder, run).read_text()) for run in runs]
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    if not chosen.quick:
        chosen.out.write_text(json.dumps({"machine": machine, "runs": results}, indent=1) + "\n")
    print_table(results)


def finish(folder: Path, run: Run) -> str:
    """Train and keep what came of it; say so in a line."""

    def on_epoch(epoch: int) -> None:
        print(f"{run.optimizer} {run.method}: epoch {epoch} of {run.epochs}", flush=True)

    result = train(run, on_epoch)
    beside = path_of(folder, run).with_suffix(".partial")
    beside.write_text(json.dumps(result))
    beside.replace(path_of(folder, run))
    return f"{run.optimizer} {run.method}: {row(result)} in {result['seconds']} s"


def finished(folder: Path, run: Run) -> bool:
    """Whether the same run, to the last setting, is there."""
    path = path_of(folder, run)
    return path.is_file() and json.loads(path.read_text())["settings"] == run.settings


def path_of(folder: Path, run: Run) -> Path:
    """Where the run's result goes."""
    words = "".join(c if c.isalnum() else " " for c in run.method).split()
    return folder / f"{run.optimizer}-{'-'.join(words)}.json"


def print_table(results: list[dict[str, Any]]) -> None:
    """Test accuracy of every method at every rate, one Markdown table for each optimizer."""
    for kind, rates in RATES.items():
        print(f"\n| {kind}, rate | {' | '.join(f'{rate:g}' for rate in rates)} |\n|---|{'---|' * len(rates)}")
        for result in results:
            if result["settings"]["optimizer"] == kind:
                print(f"| {result['name']}, `{result['settings']['method']}` | {row(result)} |")


def row(result: dict[str, Any]) -> str:
    """At each rate the mean over seeds, and half the distance between the best and the worst."""
    cells = []
    for rate in result["settings"]["rates"]:
        last = [100 * each["test"][-1] for each in result["accuracy"] if each["rate"] == rate]
        cells.append(f"{statistics.mean(last):.1f} ±{(max(last) - min(last)) / 2:.1f}")
    return " | ".join(cells)


if __name__ == "__main__":
    main()
