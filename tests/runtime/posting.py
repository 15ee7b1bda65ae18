"""Messages between two processes, without trainers."""

import gc

import torch
import torch.distributed as dist

from stretto.runtime import membership
from stretto.runtime.channel import ChannelEnd, Inbox, Outbox


def given_up(numbers):
    """Process 0 sends values and keeps nothing of them; process 1 receives them a moment later."""
    member = membership()
    rank, store = member.world.rank, member.world.store
    line = ChannelEnd(member.world.group(60), 1 - rank, 77, "values", member.status)
    if rank == 0:
        outbox = Outbox(line, depth=8)
        for number in range(numbers):
            outbox.send(torch.full((40_000,), float(number)), number)
        del outbox
        gc.collect()
        store.set("given up", "")
        dist.barrier()
        return None
    store.wait(["given up"])
    inbox = Inbox(line, torch.device("cpu"))
    letters = [inbox.receive() for _ in range(numbers)]
    dist.barrier()
    return [(letter.microbatch, letter.value.sum().item()) for letter in letters]


LENGTHS = (3, 3, 5, 40_000, 40_000, 40_000, 1, 0, 0, 7, 2, 40_000)


def changing(ahead):
    """Values whose lengths change at any time; some are dropped in between, up to a mark."""
    member = membership()
    rank, store = member.world.rank, member.world.store
    line = ChannelEnd(member.world.group(60), 1 - rank, 78, "values", member.status)
    inbox, outbox = Inbox(line, torch.device("cpu"), ahead), Outbox(line, depth=40, ahead=ahead)

    def send():
        for number, length in enumerate(LENGTHS):
            outbox.send(torch.full((length,), float(number)), number)

    received = []
    for turn in range(3):
        if rank == 0:
            send()
            if turn == 1:
                outbox.mark()
        elif turn == 1:
            received += [inbox.receive() for _ in range(4)]
            inbox.clear()
        else:
            received += [inbox.receive() for _ in LENGTHS]
    outbox.settle()
    store.wait(["read"]) if rank == 0 else store.set("read", "")
    dist.barrier()
    return [(each.microbatch, each.value.tolist()) for each in received]
