"""A command whose workers are killed at random moments, until it comes to its end all the same."""

import os
import random
import signal
import time

from processes import descendants, start


def train_under_kills(words, folder, kills, rng, *, seconds=300):
    """Run `stretto train` words, and kill a random worker `kills` times, each some time after all of them train.

    Returns how many kills there were, the status and what the command said.
    """
    process = start(words, folder)
    until = time.monotonic() + seconds
    killed = set()
    try:
        while process.poll() is None and len(killed) < kills:
            assert time.monotonic() < until, "it takes too long"
            workers = [pid for pid in descendants(process.pid) if pid not in killed]
            if len(workers) < 2 or not training(workers, folder):
                time.sleep(0.05)
                continue
            time.sleep(rng.uniform(0, 0.7))
            victim = rng.choice(workers)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                break
            killed.update(workers)  # the others end with it
            kept = workers
            while any(pid in descendants(process.pid) for pid in kept) and process.poll() is None:
                time.sleep(0.05)
        out, err = process.communicate(timeout=max(1, until - time.monotonic()))
    finally:
        process.kill()
    return len(killed), process.returncode, out, err


def training(workers, folder):
    """Whether each of these processes has begun: its events say so."""
    logs = "".join(path.read_text() for path in folder.glob(".*.partial/worker-*.jsonl"))
    return all(f'"pid": {pid},' in logs for pid in workers)


def generator(seed):
    """Where random moments come from."""
    return random.Random(seed)
