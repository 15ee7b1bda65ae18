"""A script that starts its processes by torch.multiprocessing; one of them makes a mistake of its own between steps."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import stretto


def work(rank, port):
    torch.set_num_threads(1)
    os.environ.update(RANK=f"{rank}", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    stages = [nn.Linear(4, 4), nn.Linear(4, 2)]
    trainer = stretto.Trainer(stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), "greedy")
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    for n in range(6):
        trainer.step(x, y)
        if rank == 0 and n == 2:
            raise ValueError("a mistake of the script")


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(work, (store.port,), nprocs=2, start_method="forkserver")  # spawn, but for its imports
