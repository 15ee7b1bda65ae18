"""A machine of a job on two: `python node.py PORT FOLDER [late]` starts its worker.

The worker of the second machine is killed at the first attempt. A worker that comes to its end leaves the sum of all.
The first machine may come late to the second attempt: it waits for FOLDER/go.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.runtime import membership
from stretto.runtime.launch import LaunchSettings, launch
from stretto.runtime.rendezvous.nodes import NodesRendezvous
from stretto.runtime.rendezvous.signed_store import given_secret


def work(folder):
    member = membership()
    attempt = folder / f"attempt-{member.world.rank}"
    first = not attempt.exists()
    attempt.touch()
    for each in (1.0, 2.0):
        total = torch.tensor(each)
        with member.abort_all_on_error():
            dist.all_reduce(total)
        if first and member.world.rank == 1:
            os.kill(os.getpid(), 9)
    (folder / f"sum-{member.world.rank}").write_text(f"{total.item()}")


class Late(NodesRendezvous):
    """Takes its time after it has met the others again."""

    met = False

    def next_rendezvous(self):
        found = super().next_rendezvous()
        while self.met and found.rank == 0 and not Path(folder, "go").exists():
            time.sleep(0.01)
        self.met = True
        return found


if __name__ == "__main__":
    port, folder, *late = sys.argv[1:]
    if late:
        launch.__globals__["NodesRendezvous"] = Late
    place = LaunchSettings(workers=2, nodes=2, rendezvous=f"127.0.0.1:{port}", restarts=2, secret=given_secret(None))
    launch(work, [Path(folder)], place)
