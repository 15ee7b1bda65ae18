"""Many Trainers in one process of several: what they leave, and whether one disturbs the next."""

import gc
import os
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.runtime import failure, job_member

WAYS = {
    "1f1b": {"method": "1f1b"},
    "pb": {"method": "pb"},
    "gpipe": {"method": "gpipe", "mesh": stretto.Mesh(data=2)},
    "sharded": {"mesh": stretto.Mesh(data=2), "sync": "shard-optimizer"},
    "fully sharded": {"mesh": stretto.Mesh(data=2), "sync": "fully-shard"},
    "local-sgd": {"mesh": stretto.Mesh(data=2), "sync": "local-sgd(every=2)"},
    "served": {"mesh": stretto.Mesh(data=2), "sync": "parameter-server(staleness=1)"},
    "tensor": {"mesh": stretto.Mesh(tensor=2)},
}


def made(way, timeout=60):
    torch.manual_seed(0)
    stages = [nn.Linear(8, 8), nn.Linear(8, 4)]
    return stretto.Trainer(
        stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), timeout=timeout, **WAYS[way]
    )


def trained(trainer, *, flushed=True):
    """The losses of some steps."""
    torch.manual_seed(1)
    losses = [trainer.step(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(4)]
    return [loss for loss in [*losses, *(trainer.flush() if flushed else [])] if loss is not None]


def open_now():
    """Threads and descriptors of this process."""
    return tuple(len([*Path("/proc/self", kind).iterdir()]) for kind in ("task", "fd"))


def many(ways, number, end):
    """Threads and descriptors after each of `number` Trainers, and the losses of each, for every way in turn."""
    there, losses = [], []
    for n in range(number):
        trainer = made(ways[n % len(ways)])
        losses.append(trained(trainer, flushed=end != "unfinished"))
        if end == "closed":
            trainer.close()
        there.append(open_now())
    return there, losses


def closed_by_with():
    """What a closed Trainer says, and whether the next one has the same connections."""
    with made("pb") as trainer:
        trained(trainer, flushed=False)
        group = trainer.backend.group
    with made("pb") as other:
        same = other.backend.group is group
        trained(other)
    said = []
    for use in (lambda: trained(trainer), lambda: trainer.evaluate([]), trainer.state_dict, trainer.record):
        try:
            use()
        except stretto.UsageError as error:
            said.append(f"{error}")
    trainer.close()  # once more is no harm
    try:
        with made("pb") as failing:
            raise KeyError("of the script, on both")
    except KeyError:
        pass
    with made("pb") as last:
        return same, said, last.backend.group is group, failing.stages is not None


def begun_again(times):
    """Threads and descriptors after each process group that was made, used and destroyed."""
    there = []
    port = int(os.environ["MASTER_PORT"])
    rank = int(os.environ["RANK"])
    for _ in range(times):
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False, multi_tenant=True)
        dist.init_process_group("gloo", store=dist.PrefixStore(str(len(there)), store), rank=rank, world_size=2)
        losses = [trained(made("1f1b")) for _ in range(2)]
        assert losses[0] == losses[1]
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        there.append(open_now())
    return there


def held(limit):
    """What is said once so many files are open that no other Trainer fits, while all are held."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [made("1f1b")]
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now()[1] + limit, before[1]))
    try:
        kept.extend(made("1f1b") for _ in range(20))  # one by one
    except stretto.UsageError as error:
        return f"{error}", len(kept), error.said_by
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return None


def closed_alone():
    """What the first process says that closes its Trainer alone, and then makes another one alone."""
    job_member.START = failure.GRACE = 0.1
    trainer = made("1f1b", timeout=1)
    trained(trainer)
    if trainer.rank == 1:
        while not trainer.backend.member.failures.known():
            time.sleep(0.05)
        return None
    said = []
    for use in (trainer.close, lambda: made("1f1b", timeout=1)):
        try:
            use()
        except stretto.StrettoError as error:
            said.append(f"{error}")
    return said
