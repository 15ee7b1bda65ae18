"""What two processes make of one batch, ours beside torch's own, axis by axis: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/two_workers/main.py [--rounds 9] [--steps 5] [--only "pb;1f1b"] [--out result.json]
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from variants import AXES, BEST, CASES, ONE, PIPELINES, TWO, Variant, batch, blocks, loop

from stretto.measure.busy_cores import busy_seconds

BUDGET = 240.0  # seconds, after which no round begins: on a busy machine fewer are measured
CHECKED, WARM = 2, 2  # steps compared with plain training; steps of each round before its clock starts
BARRED = ("pb", "pipedream", "greedy")  # what must be 1.6 times torch's best pipeline and 0.85 of twice one worker
BEST_BAR, TWICE_BAR, AIM = 1.6, 0.85, 0.95
Times = dict[str, list[float]]  # seconds a step, of each round


class Pair:
    """The two processes of one variant, as torchrun would start them, on a port that is free.

    They live as long as the conductor, and wait for its word without using a core.
    """

    def __init__(self, name: str) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends = [mp.Pipe() for _ in range(2)]
        self._ends = [mine for mine, _ in ends]
        for rank, (_, theirs) in enumerate(ends):
            mp.Process(target=enter, args=(rank, self._store.port, partial(obey, name, theirs)), daemon=True).start()
            theirs.close()
        self.ask(None)  # ready

    def ask(self, num_steps: int | None) -> tuple[float, float]:
        """Let both train `num_steps`: seconds a step on the slower one, CPU seconds of both. None: only answer."""
        for end in self._ends:
            end.send(num_steps)
        first, second = (end.recv() for end in self._ends)
        return max(first[0], second[0]), first[1] + second[1]


def obey(name: str, end: Connection) -> None:
    """What a process of a pair does: build, check, fill, and then train when told to, until nobody is there."""
    variant = CASES[name].make()
    check(name, variant)
    while True:
        try:
            num_steps = end.recv()
        except EOFError:
            return
        begun = time.process_time()
        taken = 0.0 if num_steps is None else seconds(variant, num_steps)
        end.send((taken, time.process_time() - begun))


def start(work: Callable[[], None]) -> None:
    """Run `work` in two processes; ends them whatever happens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(enter, (store.port, work), nprocs=2, daemon=True)


def enter(rank: int, port: int, work: Callable[[], None]) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what torch sends when the parent is gone ends this one at once
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # also the longest that orphans look for a parent
    work()
    dist.barrier()
    dist.destroy_process_group()


def check(name: str, variant: Variant) -> None:
    """Train a few steps, and compare the weights with plain training's; then fill the pipeline."""
    plain = nn.Sequential(*blocks())
    step = loop(plain, *batch())
    for _ in range(CHECKED):
        step()
    if variant.step is not None:
        for _ in range(CHECKED):
            variant.step()
        variant.flush()
        for key, weights in variant.weights().items():
            right = plain.get_parameter(key)
            torch.testing.assert_close(weights, right, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))
        for _ in range(variant.fill):
            variant.step()


def seconds(variant: Variant, num_steps: int) -> float:
    """A step's time in this process, its pipeline full from beginning to end."""
    dist.barrier()  # waits without spinning
    if variant.step is None:
        return 0.0
    for _ in range(WARM):
        variant.step()
    begin = time.perf_counter()
    for _ in range(num_steps):
        variant.step()
    return (time.perf_counter() - begin) / num_steps


def measure(names: list[str], num_rounds: int, num_steps: int) -> tuple[Times, float]:
    """Interleave variants, in another order each round; what is compared stood in the same round.

    Returns their times, and the number of cores that other programs used meanwhile.
    """
    pairs: dict[str, Pair] = {}
    for name in names:
        print(f"starting {len(pairs) + 1} of {len(names)} pairs of processes", end="\r", file=sys.stderr, flush=True)
        pairs[name] = Pair(name)
    times: Times = {name: [] for name in names}
    begin, before, own = time.perf_counter(), busy_seconds(), 0.0
    for turn in range(num_rounds):
        if turn >= 3 and time.perf_counter() - begin > BUDGET:
            break
        shift = turn * 5 % len(names)
        for name in (*names[shift:], *names[:shift]):
            print(f"round {turn + 1} of {num_rounds}: {name:<40}", end="\r", file=sys.stderr, flush=True)
            taken, used = pairs[name].ask(num_steps)
            times[name].append(taken)
            own += used
    return times, (busy_seconds() - before - own) / (time.perf_counter() - begin)


def best_of_torchs(times: Times) -> str:
    """The pipeline of torch's whose median is the shortest."""
    return min((name for name in PIPELINES if name in times), key=lambda name: statistics.median(times[name]))


def figures_of(times: Times) -> dict[str, dict[str, float]]:
    """What is told of each variant; of speeds, those of its two loops together where they train two networks."""
    best = times[best_of_torchs(times)] if any(name in times for name in PIPELINES) else None
    figures: dict[str, dict[str, float]] = {}
    for name, each in times.items():
        twice = 2 if name == TWO else 1
        row = {"milliseconds": 1e3 * statistics.median(each)}
        if ONE in times:
            row["times one worker"] = ratio(times[ONE], each) * twice
        if TWO in times:
            row["of the ceiling"] = ratio(times[TWO], each) / 2 * twice
        if best is not None:
            row["times the best torch schedule"] = ratio(best, each) * twice
        beside = CASES[name].beside
        torchs = best if beside == BEST else times.get(beside or "")
        if beside is not None and torchs is not None:
            row["ours / torch's"] = ratio(each, torchs)
        figures[name] = row
    return figures


def show(figures: dict[str, dict[str, float]]) -> None:
    """Print the table, axis by axis."""
    for axis, cases in AXES.items():
        rows = {name: figures[name] for name in cases if name in figures}
        if rows:
            print(f"{axis:<42} ms a step  x one worker  of ceiling  ours / torch's")
        for name, row in rows.items():
            told = [
                f"{row[key]:{width}.2f}" if key in row else " " * width
                for key, width in (("times one worker", 12), ("of the ceiling", 10), ("ours / torch's", 14))
            ]
            print(f"  {name:<40} {row['milliseconds']:9.1f}  {'  '.join(told)}   {verdict(name, row)}".rstrip())


def write(times: Times, figures: dict[str, dict[str, float]], others: float, out: Path) -> None:
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    result = {
        "machine": machine,
        "cores used by others": others,
        "ceiling": figures[TWO]["times one worker"],
        "torch's best pipeline": best_of_torchs(times),
        "figures": figures,
        "seconds": times,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def verdict(name: str, row: dict[str, float]) -> str:
    if name.split(",")[0] not in BARRED or "times one worker" not in row or "times the best torch schedule" not in row:
        return ""
    share = row["times one worker"] / 2
    met = "met" if row["times the best torch schedule"] >= BEST_BAR and share >= TWICE_BAR else "MISSED"
    aim = ", aim reached" if share >= AIM else ""
    return f"{share:.2f} of twice one worker; bars {BEST_BAR} and {TWICE_BAR}: {met}{aim}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--only", default="", help="variants whose names contain one of these words; nothing is written"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    chosen = parser.parse_args()
    words = [word.strip() for word in chosen.only.split(";") if word.strip()]
    names = [name for name in CASES if not words or any(word in name for word in words)]
    if not names:
        parser.error(f"--only {chosen.only}: no variant's name contains that; they are: {'; '.join(CASES)}")
    mp.set_start_method("spawn")
    times, others = measure(names, chosen.rounds, chosen.steps)
    figures = figures_of(times)
    show(figures)
    print(f"other programs used {others:.2f} cores meanwhile")
    if not words:
        write(times, figures, others, chosen.out)


if __name__ == "__main__":
    main()
