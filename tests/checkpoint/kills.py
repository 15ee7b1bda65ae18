"""Kills writers of checkpoints, again and again, and looks each time whether the last good one is there.

    python tests/checkpoint/kills.py --kills 1000 --seed 0

Three ways: at a random moment, one path that is always replaced, or steps that are pruned; and before each operation on
the file system (each of Python's audit events about one), or each of a `--stride`, one after the other.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import stretto.checkpoint.tensors  # noqa: F401 (once, not in every writer)
from stretto.checkpoint import Manifest, newest, prune, read_manifest, read_stage, verify, write

STAGES = 2
OPERATIONS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree"}


def save(path: Path, n: int) -> None:
    states = [{"w": torch.full((2000,), n), "n": n} for _ in range(STAGES)]
    write(path, states, Manifest(method="greedy", seed=0, precision=None, entered=n))


def content(path: Path) -> int:
    """Which checkpoint is at `path`; everything in it must be of that one."""
    verify(path)
    n = read_manifest(path).entered
    for index in range(STAGES):
        state = read_stage(path, index)
        assert state["n"] == n, state
        assert torch.equal(state["w"], torch.full((2000,), n))
    return n


def replace(folder: Path, n: int) -> None:
    save(folder / "run", n)


def found_replaced(folder: Path) -> int:
    return content(folder / "run")


def add_step(folder: Path, n: int) -> None:
    save(folder / f"step-{n}", n)
    prune(folder)


def found_step(folder: Path) -> int:
    path, complaints = newest(folder)
    assert path is not None, complaints
    assert all("was never finished" in text for text in complaints), complaints
    return content(path)


def fork(writing: Callable[[int], None]) -> tuple[int, int]:
    """A process that runs `writing` with a pipe's end; its id and the other end."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            writing(writer)
        finally:
            os._exit(1)
    os.close(writer)
    return process, reader


def last_said(reader: int, before: int) -> int:
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().split()
    return int(said[-1]) if said else before


def random_kills(save_one: Callable[[Path, int], None], found: Callable[[Path], int], kills: int, seed: int) -> Counter:
    """Kill at random moments. Counts whether the save that was killed was "before" or "after" the moment it counts."""
    draw, counts = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as place:
        folder, last = Path(place), 1
        save_one(folder, last)
        for _ in range(kills):

            def writing(pipe: int, first: int = last + 1) -> None:
                for n in range(first, first + 10**6):
                    save_one(folder, n)
                    os.write(pipe, b"%d\n" % n)

            process, reader = fork(writing)
            time.sleep(draw.uniform(0, 0.12))
            os.kill(process, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL, "the writer failed"
            said, last = last_said(reader, last), found(folder)
            assert last in (said, said + 1), f"{said} had been saved, {last} is there: {sorted(folder.iterdir())}"
            counts["before" if last == said else "after"] += 1
    return counts


def ordered_kills(save_one: Callable[[Path, int], None], found: Callable[[Path], int], stride: int) -> Counter:
    """Kill before the first operation of a save, then before the one `stride` later, until one save gets through."""
    counts: Counter = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for n in (1, 2, 3):
            save_one(folder, n)
        last = 3
        while True:
            process, reader = fork(lambda pipe: dying(save_one, folder, last + 1, stride * sum(counts.values())))  # noqa: B023
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            os.close(reader)
            now = found(folder)
            if code == 1:
                assert now == last + 1
                return counts
            assert code == -signal.SIGKILL
            assert now in (last, last + 1)
            counts["before" if now == last else "after"] += 1
            if now == last + 1:  # the next one's first operations are the same: go on with a whole one at hand
                last = now


def dying(save_one: Callable[[Path, int], None], folder: Path, n: int, operations: int) -> None:
    left = [operations]

    def count(event: str, arguments: tuple) -> None:
        if event in OPERATIONS or (event == "open" and str(folder) in str(arguments[0])):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save_one(folder, n)


WAYS = {"replaced": (replace, found_replaced), "steps": (add_step, found_step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="at random moments, of each way")
    parser.add_argument("--stride", type=int, default=1, help="from one of the operations that are met to the next")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result = {}
    for name, way in WAYS.items():
        result[f"{name}, before each operation"] = ordered_kills(*way, given.stride)
        result[f"{name}, at random"] = random_kills(*way, given.kills, given.seed)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
