"""What two processes make of one batch, ours beside torch's own pipelines: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/two_workers/main.py [--rounds 9] [--steps 6] [--out result.json]
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import stretto

BLOCKS, WIDTH, CLASSES, BATCH = 8, 1024, 10, 256
BUDGET = 240.0  # seconds, after which no round begins: on a busy machine fewer are measured
CHECKED, WARM = 2, 2  # steps compared with plain training; steps of each round before its clock starts
ONE, TWO, DDP = "one worker", "two one-worker loops", "DistributedDataParallel"
SCHEDULES: tuple[tuple[str, type, int], ...] = (
    ("torch GPipe, 2 micro-batches", ScheduleGPipe, 2),
    ("torch GPipe, 4 micro-batches", ScheduleGPipe, 4),
    ("torch 1F1B, 2 micro-batches", Schedule1F1B, 2),
    ("torch 1F1B, 4 micro-batches", Schedule1F1B, 4),
)
BARRED = ("pb", "pipedream", "greedy")  # what must be 1.6 times torch's best and 0.85 of twice one worker
PIPELINES = ("1f1b(microbatches=2)", "1f1b(microbatches=4)", "gpipe(microbatches=2)", "gpipe(microbatches=4)")
METHODS = tuple((method, stages) for method in BARRED for stages in (2, 8)) + tuple((each, 2) for each in PIPELINES)
BEST_BAR, TWICE_BAR, AIM = 1.6, 0.85, 0.95


@dataclass(frozen=True)
class Variant:
    """One way to train the network, as one of its two processes takes part in it."""

    step: Callable[[], object] | None  # None: this process has no part, and waits
    blocks: dict[int, nn.Module]  # what this process trains, by index
    plain: bool = True  # equals plain training
    fill: int = 0  # steps until every stage is busy
    flush: Callable[[], object] = lambda: None


class Pair:
    """The two processes of one variant, as torchrun would start them, on a port that is free.

    They live as long as the conductor, and wait for its word without using a core.
    """

    def __init__(self, name: str) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends = [mp.Pipe() for _ in range(2)]
        self._ends = [mine for mine, _ in ends]
        for rank, (_, theirs) in enumerate(ends):
            mp.Process(target=enter, args=(rank, self._store.port, partial(obey, name, theirs)), daemon=True).start()
            theirs.close()
        self.ask(None)  # ready

    def ask(self, num_steps: int | None) -> tuple[float, float]:
        """Let both train `num_steps`: seconds a step on the slower one, CPU seconds of both. None: only answer."""
        for end in self._ends:
            end.send(num_steps)
        first, second = (end.recv() for end in self._ends)
        return max(first[0], second[0]), first[1] + second[1]


def obey(name: str, end: Connection) -> None:
    """What a process of a pair does: build, check, fill, and then train when told to, until nobody is there."""
    variant = VARIANTS[name]()
    check(name, variant)
    while True:
        try:
            num_steps = end.recv()
        except EOFError:
            return
        begun = time.process_time()
        taken = 0.0 if num_steps is None else seconds(variant, num_steps)
        end.send((taken, time.process_time() - begun))


def start(work: Callable[[], None]) -> None:
    """Run `work` in two processes; ends them whatever happens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(enter, (store.port, work), nprocs=2, daemon=True)


def enter(rank: int, port: int, work: Callable[[], None]) -> None:
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what torch sends when the parent is gone ends this one at once
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # also the longest that orphans look for a parent
    work()
    dist.barrier()
    dist.destroy_process_group()


def blocks() -> list[nn.Module]:
    """Eight one-layer blocks; the last also holds the output layer."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(BLOCKS)]
    made[-1].append(nn.Linear(WIDTH, CLASSES))
    return list(made)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randint(0, CLASSES, (BATCH,))


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def loop(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], float]:
    """The plain training loop."""
    made = optimizer(list(model.parameters()))

    def step() -> float:
        loss = cross_entropy(model(x), y)
        loss.backward()
        made.step()
        made.zero_grad()
        return loss.item()

    return step


def one_worker(ranks: tuple[int, ...]) -> Variant:
    """Each of `ranks` trains a network of its own."""
    if dist.get_rank() not in ranks:
        return Variant(None, {})
    own = blocks()
    return Variant(loop(nn.Sequential(*own), *batch()), dict(enumerate(own)))


def data_parallel() -> Variant:
    """Each process has half of the batch."""
    own, rank = blocks(), dist.get_rank()
    x, y = (part.tensor_split(2)[rank] for part in batch())
    model = DistributedDataParallel(nn.Sequential(*own), process_group=dist.new_group())
    return Variant(loop(model, x, y), dict(enumerate(own)))


def torch_schedule(kind: type, num_microbatches: int) -> Variant:
    """Each process has half of the blocks, and an optimizer for them."""
    rank, (x, y) = dist.get_rank(), batch()
    own = half(rank)
    module = nn.Sequential(*own.values())
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=dist.new_group())
    schedule = kind(stage, num_microbatches, loss_fn=cross_entropy)
    made = optimizer(list(module.parameters()))

    def step() -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, losses=losses, return_outputs=False)
        made.step()
        made.zero_grad()
        return sum(loss.item() for loss in losses) / num_microbatches if losses else None

    return Variant(step, own)


def ours(method: str, num_stages: int) -> Variant:
    """The script of one process, unchanged."""
    x, y = batch()
    whole = blocks()
    size = BLOCKS // num_stages
    stages = [nn.Sequential(*whole[at : at + size]) for at in range(0, BLOCKS, size)]
    trainer = stretto.Trainer(stages, cross_entropy, optimizer, method, workers=2, device="cpu")
    own = {index: whole[index] for index in half(dist.get_rank())}
    synchronous = trainer.lag == 0
    return Variant(lambda: trainer.step(x, y), own, synchronous, 2 * num_stages, trainer.flush)


def half(rank: int) -> dict[int, nn.Module]:
    return dict(list(enumerate(blocks()))[rank * BLOCKS // 2 : (rank + 1) * BLOCKS // 2])


def name_of(method: str, num_stages: int) -> str:
    return f"{method}, {num_stages} stages"


VARIANTS: dict[str, Callable[[], Variant]] = {
    ONE: partial(one_worker, (0,)),
    TWO: partial(one_worker, (0, 1)),
    DDP: data_parallel,
    **{name: partial(torch_schedule, kind, pieces) for name, kind, pieces in SCHEDULES},
    **{name_of(method, stages): partial(ours, method, stages) for method, stages in METHODS},
}


def check(name: str, variant: Variant) -> None:
    """Train a few steps, and compare the weights with plain training's; then fill the pipeline."""
    plain = blocks()
    step = loop(nn.Sequential(*plain), *batch())
    for _ in range(CHECKED):
        step()
    if variant.step is not None:
        for _ in range(CHECKED):
            variant.step()
        variant.flush()
        for index, block in variant.blocks.items() if variant.plain else ():
            for mine, right in zip(block.parameters(), plain[index].parameters(), strict=True):
                torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6, msg=partial("{}: {}".format, name))
        for _ in range(variant.fill):
            variant.step()


def seconds(variant: Variant, num_steps: int) -> float:
    """A step's time in this process, its pipeline full from beginning to end."""
    dist.barrier()  # waits without spinning
    if variant.step is None:
        return 0.0
    for _ in range(WARM):
        variant.step()
    begin = time.perf_counter()
    for _ in range(num_steps):
        variant.step()
    return (time.perf_counter() - begin) / num_steps


def measure(num_rounds: int, num_steps: int, out: Path) -> None:
    """Interleave all variants, in another order each round; what is compared stood in the same round."""
    pairs: dict[str, Pair] = {}
    for name in VARIANTS:
        print(f"starting {len(pairs) + 1} of {len(VARIANTS)} pairs of processes", end="\r", file=sys.stderr, flush=True)
        pairs[name] = Pair(name)
    names = list(pairs)
    times: dict[str, list[float]] = {name: [] for name in names}
    begin, before, own = time.perf_counter(), busy(), 0.0
    for turn in range(num_rounds):
        if turn >= 3 and time.perf_counter() - begin > BUDGET:
            break
        shift = turn * 5 % len(names)
        for name in (*names[shift:], *names[:shift]):
            print(f"round {turn + 1} of {num_rounds}: {name:<40}", end="\r", file=sys.stderr, flush=True)
            taken, used = pairs[name].ask(num_steps)
            times[name].append(taken)
            own += used
    others = (busy() - before - own) / (time.perf_counter() - begin)
    write(times, others, out)


def busy() -> float:
    """CPU seconds used on this machine, or by machines that share its cores, up to now (Linux)."""
    jiffies = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(jiffies) - jiffies[3] - jiffies[4]) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk


def write(times: dict[str, list[float]], others: float, out: Path) -> None:
    best = min((times[name] for name, _, _ in SCHEDULES), key=statistics.median)
    twice = 2 * ratio(times[ONE], times[TWO])
    figures = {
        name: {
            "milliseconds": 1e3 * statistics.median(each),
            "times one worker": ratio(times[ONE], each) * (2 if name == TWO else 1),
            "of the ceiling": ratio(times[TWO], each) / 2 * (2 if name == TWO else 1),
            "times the best torch schedule": ratio(best, each) * (2 if name == TWO else 1),
        }
        for name, each in times.items()
    }
    print(f"{'':<30} ms a step  x one worker  of ceiling  x torch's best")
    for name, row in figures.items():
        ms, one, ceiling, torchs = row.values()
        print(f"{name:<30} {ms:9.1f}  {one:12.2f}  {ceiling:10.2f}  {torchs:14.2f}   {verdict(name, one, torchs)}")
    print(f"ceiling: two loops that do not talk are {twice:.2f} times one worker")
    print(f"other programs used {others:.2f} cores meanwhile")
    pairs = one_f_one_b(times)
    for name, value in pairs.items():
        print(f"{name:<58} {value:.2f}   bar 1: {'met' if value >= 1 else 'MISSED'}")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    result = {
        "machine": machine,
        "cores used by others": others,
        "ceiling": twice,
        "figures": figures,
        "1f1b": pairs,
        "seconds": times,
    }
    out.write_text(json.dumps(result | {"seconds": times}, indent=1) + "\n")


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def verdict(name: str, one: float, torchs: float) -> str:
    if name.split(",")[0] not in BARRED:
        return ""
    share = one / 2
    met = "met" if torchs >= BEST_BAR and share >= TWICE_BAR else "MISSED"
    aim = ", aim reached" if share >= AIM else ""
    return f"{share:.2f} of twice one worker; bars {BEST_BAR} and {TWICE_BAR}: {met}{aim}"


def one_f_one_b(times: dict[str, list[float]]) -> dict[str, float]:
    """How much faster our 1F1B is than torch's, at the same number of micro-batches."""
    return {
        f"{mine} / {name}": ratio(times[name], times[mine])
        for name, kind, pieces in SCHEDULES
        if kind is Schedule1F1B and (mine := name_of(f"1f1b(microbatches={pieces})", 2)) in times
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    chosen = parser.parse_args()
    mp.set_start_method("spawn")
    measure(chosen.rounds, chosen.steps, chosen.out)


if __name__ == "__main__":
    main()
