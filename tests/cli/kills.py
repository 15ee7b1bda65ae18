"""Workers are killed at random moments; the run comes to the very weights of an undisturbed one all the same.

By hand, for longer than a test may take: `python -m cli.kills --kills 50 --seed 1`, in the folder of the tests.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import safetensors.torch
import torch

from cli.processes import alive, forks, start
from runtime.processes import free_port
from stretto import cli

SMALL = ["--model-options.width", "8", "--model-options.depth", "4", "--batch-size", "32", "--evaluations", "3"]
METHODS = ("pb-lwp-sc", "1f1b", "greedy", "pipedream-2bw", "overlapping", "gpipe", "spectrain", "zb-h1", "pipemare")
# None is a run without replicas.
SYNCS = (None, "local-sgd(every=7)", "diloco(every=7)", "all-reduce", "local-sgd(every=7,start=120)")


def survives(folder, method, *, steps, every, kills, rng, sync=None, workers=2, nodes=1, seconds=300):
    """Train on processes of which some are killed, then in this one; return how many, having compared the weights.

    All nodes are this machine. Their launchers do not count restarts alike. With `sync` there are two replicas.
    """
    words = ["train", *SMALL, "--method", method, "--steps", str(steps), "--checkpoint-every", str(every), "--quiet"]
    words += [] if sync is None else ["--data-parallel", "2", "--sync", sync]
    if nodes > 1:
        (folder / "secret").write_text("a secret for killed workers")
    door = ["--rendezvous", f"127.0.0.1:{free_port()}", "--secret-file", str(folder / "secret")]
    meet = [] if nodes == 1 else ["--nodes", str(nodes), *door]
    there = [*words, *meet, "--out", "run", "--workers", str(workers), "--restarts", str(kills * nodes)]
    commands = [start(there, folder) for _ in range(nodes)]
    until, made = time.monotonic() + seconds, 0
    try:
        while run(commands) and made < kills:
            assert time.monotonic() < until, "it takes too long"
            made += kill_one(commands, folder, workers, rng)
        for command in commands:
            out, err = command.communicate(timeout=max(1, until - time.monotonic()))
            assert (command.returncode, out) == (0, ""), err
            told = [line for line in err.splitlines() if "all workers start again" not in line]
            assert nodes > 1 or not told, err  # of a store that has gone with its process, torch tells in C++
            assert nodes > 1 or len(err.splitlines()) == made, "a restart is told, once"
    finally:
        for command in commands:
            command.kill()
    assert cli.main([*words, "--out", str(folder / "undisturbed")]) == 0
    one, other = (safetensors.torch.load_file(folder / name / "model.safetensors") for name in ("undisturbed", "run"))
    assert list(one) == list(other)
    assert all(torch.equal(one[key], other[key]) for key in one)
    return made


def run(commands):
    return all(command.poll() is None for command in commands)


def kill_one(commands, folder, workers, rng):
    """Wait until all workers have begun, then up to a second, then kill one of them; whether it was still there."""
    group = [pid for command in commands for pid in forks(command.pid)]
    if len(group) < workers or not all(begun(folder, pid) for pid in group):
        time.sleep(0.02)
        return False
    time.sleep(rng.random())
    victim = rng.choice(group)
    if not alive(victim) or not run(commands):
        return False
    os.kill(victim, signal.SIGKILL)
    while any(alive(pid) for pid in group) and run(commands):
        time.sleep(0.02)
    return True


def begun(folder, pid):
    """Whether a process has told of its start."""
    return any(f'"pid": {pid},' in log.read_text() for log in folder.glob(".run.partial/worker-*.jsonl"))


def main():
    """So many kills, a few for each method in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--replicas", action="store_true", help="of some runs two, under each sync in turn")
    given = parser.parse_args()
    rng, made = random.Random(given.seed), 0
    for turn in range(given.kills):
        if made >= given.kills:
            break
        method, sync = METHODS[turn % len(METHODS)], SYNCS[turn % len(SYNCS)] if given.replicas else None
        with tempfile.TemporaryDirectory() as folder:
            kills = min(6, given.kills - made)
            found = survives(
                Path(folder),
                method,
                steps=1500,
                every=50,
                kills=kills,
                rng=rng,
                sync=sync,
                nodes=given.nodes,
                seconds=900,
            )
        made += found
        print(
            f"{method}, {sync or 'one replica'}: {found} kills, the same weights; {made} of {given.kills} in all",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
