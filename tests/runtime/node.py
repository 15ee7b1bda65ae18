"""A machine of a job on two: `python node.py PORT FOLDER` starts its worker.

The worker of the second machine is killed at the first attempt. A worker that comes to its end leaves the sum of all.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.runtime import membership
from stretto.runtime.launch import LaunchSettings, launch
from stretto.runtime.rendezvous.signed_store import given_secret


def work(folder):
    member = membership()
    attempt = folder / f"attempt-{member.world.rank}"
    first = not attempt.exists()
    attempt.touch()
    for each in (1.0, 2.0):
        total = torch.tensor(each)
        with member.together():
            dist.all_reduce(total)
        if first and member.world.rank == 1:
            os.kill(os.getpid(), 9)
    (folder / f"sum-{member.world.rank}").write_text(f"{total.item()}")


if __name__ == "__main__":
    port, folder = sys.argv[1:]
    place = LaunchSettings(workers=2, nodes=2, rendezvous=f"127.0.0.1:{port}", restarts=2, secret=given_secret(None))
    launch(work, [Path(folder)], place)
