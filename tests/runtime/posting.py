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


def rare(sizes):
    """Process 0 sends values of several sizes that are rare; the values' sums in process 1, and what each end holds."""
    member = membership()
    rank = member.world.rank
    line = ChannelEnd(member.world.group(60), 1 - rank, 78, "values", member.status, rare=True)
    if rank == 0:
        outbox = Outbox(line, depth=8)
        for number, size in enumerate(sizes):
            outbox.send(torch.full((size,), 1.0), number)
        outbox.settle()
        sums = []
    else:
        inbox = Inbox(line, torch.device("cpu"))
        sums = [inbox.receive().value.sum().item() for _ in sizes]
    dist.barrier()
    held = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.dtype == torch.uint8]
    return sums, max((each.numel() for each in held), default=0)
