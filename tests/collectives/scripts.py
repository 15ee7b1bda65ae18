"""What the processes of tests/laws/test_all_reduce.py do."""

import io
import logging
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import stretto
from stretto.collectives import ALGORITHMS, reduce
from stretto.collectives.reduce import execute

LENGTHS = (0, 1, 7, 1000)
PIECE = 1024  # bytes of a message that travel at a time: the longest come in pieces
DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.complex64)


class Counting:
    """A group that counts what is sent."""

    def __init__(self, group):
        self.group, self.messages, self.elements = group, 0, 0

    def send(self, tensors, peer, tag):
        self.messages += 1
        self.elements += tensors[0].numel()
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self.group.recv(tensors, peer, tag)


def join():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return int(os.environ["RANK"])


def subgroups():
    return [dist.new_group(list(range(size))) for size in range(1, dist.get_world_size() + 1)]


def whole_numbers(size, length, rank, dtype=torch.float32):
    """What a process has, and the exact sum."""
    own = [(torch.arange(length) * (each + 3) + each) % 7 for each in range(size)]
    return own[rank].to(dtype), sum(own).to(dtype)


def every_algorithm():
    """All of them on groups of 1 to 8: what was wrong, and the messages and elements each process sent."""
    rank, wrong, sent = join(), [], {}
    reduce.PIECE = PIECE
    groups = subgroups()
    for group in groups[rank:]:
        size = group.size()
        for algorithm in ALGORITHMS:
            for length in LENGTHS:
                mine, total = whole_numbers(size, length, rank)
                counting = Counting(group)
                reduce.execute = lambda program, flat, group, tag, to=counting: execute(program, flat, to, tag)
                if stretto.collectives.all_reduce(mine, group, algorithm) is not mine or not torch.equal(mine, total):
                    wrong.append((algorithm, size, length))
                sent[algorithm, size, length] = counting.messages, counting.elements
            reduce.execute = execute
            if size in (1, 3, 4, 8):
                wrong += [(algorithm, size, each) for each in others(group, size, algorithm, rank)]
    dist.barrier()
    dist.destroy_process_group()
    return wrong, sent


def others(group, size, algorithm, rank):
    """Other types, memory that is not contiguous, numbers whose sum is rounded."""
    for dtype in DTYPES:
        mine, total = whole_numbers(size, 33, rank, dtype)
        if not torch.equal(stretto.collectives.all_reduce(mine, group, algorithm), total):
            yield dtype
    mine, total = whole_numbers(size, 60, rank)
    base = torch.full((5, 24), -1.0)
    view = base.t()[::2]  # [12, 5]
    view.copy_(mine.view(12, 5))
    stretto.collectives.all_reduce(view, group, algorithm)
    if not torch.equal(view, total.view(12, 5)) or not bool((base[:, 1::2] == -1).all()):
        yield "strided"
    leaf = torch.nn.Parameter(torch.tensor(1.0 + rank))
    if stretto.collectives.all_reduce(leaf, group, algorithm).item() != size * (size + 1) / 2 or leaf.grad_fn:
        yield "parameter without dimensions"
    generator = torch.Generator().manual_seed(rank)
    rounded = torch.randn(1001, generator=generator)
    stretto.collectives.all_reduce(rounded, group, algorithm)
    told = [torch.empty_like(rounded) for _ in range(size)]
    dist.all_gather(told, rounded, group=group)
    exact = sum(torch.randn(1001, generator=torch.Generator().manual_seed(each)).double() for each in range(size))
    if not all(torch.equal(each, rounded) for each in told) or (rounded - exact).abs().max() > 1e-5:
        yield "not the same everywhere"


def several_at_once():
    """Two groups of the same processes, each used by a thread, and the user's own messages between them."""
    from threading import Thread

    rank = join()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    sums, threads = {}, []

    def reduce(number):
        for turn in range(4):
            tensor = torch.full((257,), float(turn + 100 * number + rank))
            stretto.collectives.all_reduce(tensor, groups[number], ("ring", "recursive-doubling")[turn % 2])
            sums[number, turn] = tensor.unique().tolist()

    for number in range(2):
        threads.append(Thread(target=reduce, args=(number,)))
        threads[-1].start()
    own = torch.full((257,), 7.0 + rank)
    theirs = torch.empty(257)
    works = [dist.irecv(theirs, 1 - rank, group=groups[0]), dist.isend(own, 1 - rank, group=groups[0])]
    for thread in threads:
        thread.join()
    for work in works:
        work.wait()
    dist.barrier()
    dist.destroy_process_group()
    return sums, theirs.unique().tolist()


def mistakes():
    """What the user is told."""
    from stretto.errors import UsageError

    told = {}

    def attempt(name, *args, **options):
        try:
            stretto.collectives.all_reduce(*args, **options)
        except (UsageError, stretto.collectives.CollectiveError) as error:
            told[name] = f"{type(error).__name__} {error}"

    attempt("alone", torch.ones(1))
    rank = join()
    attempt("bool", torch.ones(2, dtype=torch.bool))
    attempt("sparse", torch.ones(2).to_sparse())
    attempt("name", torch.ones(2), algorithm="rings")
    first = dist.new_group([0])
    attempt("member", torch.ones(2), first)
    short = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    begin = time.monotonic()
    attempt("mismatch", torch.ones(4 + rank), short)
    told["seconds"] = time.monotonic() - begin
    return told


def trainer(sync):
    """Two replicas of two stages; on processes each of the four has one."""
    torch.manual_seed(0)
    stages = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)]
    return stretto.Trainer(
        stages, torch.nn.functional.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1),
        "1f1b(microbatches=2)", mesh=stretto.Mesh(data=2), sync=sync,
    )  # fmt: skip


def chosen_by(sync):
    """The algorithms that gradients were added up by in a step, and what was logged."""
    names, said, plan = set(), io.StringIO(), reduce.program_of

    def spy(algorithm, *rest):
        names.add(algorithm)
        return plan(algorithm, *rest)

    logger, handler = logging.getLogger("stretto"), logging.StreamHandler(said)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    reduce.program_of = spy
    try:
        made = trainer(sync)
        made.step(torch.ones(8, 8), torch.arange(8) % 4)
        made.flush()
    finally:
        reduce.program_of = plan
        logger.removeHandler(handler)
    return sorted(names), said.getvalue().strip()


def what_auto_chose(folder):
    """With a cache folder of each process's own; with none on the first; with a file named that only the first has."""
    rank = int(os.environ["RANK"])
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    by_own = chosen_by("all-reduce(algorithm=auto)")
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{'nothing' if rank == 0 else 3}"
    by_none = chosen_by("all-reduce(algorithm=auto)")
    os.chdir(f"{folder}/{rank}")
    return by_own, by_none, chosen_by("all-reduce(algorithm=auto, calibration='named.toml')")


def refused(folder, sync):
    """What a Trainer raises where the cache folder is one that only the first process has."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{os.environ['RANK']}"
    try:
        trainer(sync)
    except (stretto.UsageError, SystemExit) as error:  # the first error is the job's, and ends the other processes
        return type(error).__name__, str(error)
    return None
