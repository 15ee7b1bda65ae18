"""A machine of a job on two: `python node.py PORT FOLDER [RESTARTS]` starts its worker.

The worker of the second machine is killed at the first attempt; with RESTARTS, at each. A worker that comes
to its end leaves the sum of all.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.runtime import membership
from stretto.runtime.launch import LaunchSettings, launch
from stretto.runtime.rendezvous.signed_store import given_secret


def work(folder, always):
    member = membership()
    attempt = folder / f"attempt-{member.world.rank}"
    first = not attempt.exists()
    attempt.touch()
    for each in (1.0, 2.0):
        total = torch.tensor(each)
        with member.together():
            dist.all_reduce(total)
        if (first or always) and member.world.rank == 1:
            os.kill(os.getpid(), 9)
    (folder / f"sum-{member.world.rank}").write_text(f"{total.item()}")


if __name__ == "__main__":
    port, folder, *restarts = sys.argv[1:]
    place = LaunchSettings(
        workers=2,
        nodes=2,
        rendezvous=f"127.0.0.1:{port}",
        restarts=int(restarts[0]) if restarts else 2,
        secret=given_secret(None),
    )
    launch(work, [Path(folder), bool(restarts)], place)
