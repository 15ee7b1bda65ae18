"""Our all-reduce beside torch's over gloo, processes of one thread on one machine: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/all_reduce/main.py [--workers 2] [--seconds 20] [--out result.json]
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from stretto.collectives import all_reduce
from stretto.measure.busy_cores import busy_seconds

SIZES = tuple(1 << exponent for exponent in range(12, 27, 2))  # bytes: 4 KB to 64 MB
SMALL, LARGE = 1 << 14, 1 << 20  # bytes: bars below the one, from the other on
TORCH, RING, DOUBLING = "torch", "ring", "recursive-doubling"
LARGE_BAR, SMALL_BAR = 1.3, 1.0  # times torch's at most
FEWEST, MOST = 7, 300  # rounds a size


def start(work: Callable[[], None], workers: int) -> None:
    """Run `work` in so many processes on a port that is free; ends them whatever happens."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(enter, (store.port, workers, work), nprocs=workers, daemon=True)


def enter(rank: int, port: int, workers: int, work: Callable[[], None]) -> None:
    own = {"RANK": rank, "WORLD_SIZE": workers, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what torch sends when the parent is gone ends this one at once
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    work()
    dist.barrier()
    dist.destroy_process_group()


def once(call: Callable[[Tensor], object], tensor: Tensor) -> float:
    """Seconds of one all-reduce, all processes beginning together."""
    tensor.zero_()
    dist.barrier()
    begin = time.perf_counter()
    call(tensor)
    return time.perf_counter() - begin


def calls() -> dict[str, Callable[[Tensor], object]]:
    return {TORCH: dist.all_reduce} | {name: partial(all_reduce, algorithm=name) for name in (RING, DOUBLING)}


def check(tensor: Tensor) -> None:
    """Every call gives the sum."""
    own = torch.arange(tensor.numel(), dtype=torch.float32) % 1000
    size = dist.get_world_size()
    for name, call in calls().items():
        tensor.copy_(own * (dist.get_rank() + 1))
        call(tensor)
        assert torch.equal(tensor, own * (size * (size + 1) / 2)), name


def measure(seconds: float, out: Path) -> None:
    """Each size for a share of the time; all calls in each round, in a random order, the same on all processes."""
    draw, times = random.Random(0), {}
    begin, before = time.perf_counter(), disturbance()
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        check(tensor)
        rounds: list[list[float]] = []
        spent = 0.0
        while len(rounds) < FEWEST or (spent < seconds / len(SIZES) and len(rounds) < MOST):
            order = draw.sample(list(calls()), k=len(calls()))
            taken = {name: once(calls()[name], tensor) for name in order}
            slowest = torch.tensor([taken[name] for name in calls()], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rounds.append(slowest.tolist())
            spent += sum(rounds[-1])
        times[size] = dict(zip(calls(), zip(*rounds, strict=True), strict=True))
    others = (disturbance() - before) / (time.perf_counter() - begin)
    if dist.get_rank() == 0:
        write(times, others, out)


def disturbance() -> float:
    """CPU seconds that went to other programs of this machine, or machines that share its cores, up to now (Linux)."""
    own = torch.tensor(time.process_time())
    dist.all_reduce(own)
    return busy_seconds() - own.item()


def write(times: dict[int, dict[str, tuple[float, ...]]], others: float, out: Path) -> None:
    figures = {}
    print(f"{'bytes':>9}  {'torch':>9}  {'ring':>9}  {'doubling':>9} ms   ring/torch  doubling/torch   rounds")
    for size, each in times.items():
        ms = {name: 1e3 * statistics.median(column) for name, column in each.items()}
        ratios = {name: statistics.median(ratios_of(each, name)) for name in (RING, DOUBLING)}
        figures[size] = {"milliseconds": ms, "times torch": ratios, "rounds": len(each[TORCH])}
        row = "  ".join(f"{value:9.3f}" for value in ms.values())
        rest = f"{ratios[RING]:10.2f}  {ratios[DOUBLING]:14.2f}   {len(each[TORCH]):6}  {verdict(size, ratios)}"
        print(f"{size:9}  {row}      {rest}")
    print(f"{dist.get_world_size()} workers; other programs used {others:.2f} cores meanwhile")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    key = f"{dist.get_world_size()} workers"
    kept = json.loads(out.read_text()) if out.exists() else {}
    kept[key] = {"machine": machine, "cores used by others": others, "figures": figures}
    out.write_text(json.dumps(kept, indent=1) + "\n")


def ratios_of(times: dict[str, tuple[float, ...]], name: str) -> list[float]:
    """Our time over torch's, in each round."""
    return [ours / theirs for ours, theirs in zip(times[name], times[TORCH], strict=True)]


def verdict(size: int, ratios: dict[str, float]) -> str:
    if size >= LARGE:
        return f"bar {LARGE_BAR}: {'met' if ratios[RING] <= LARGE_BAR else 'MISSED'}"
    if size < SMALL:
        return f"bar {SMALL_BAR}: {'met' if ratios[DOUBLING] <= SMALL_BAR else 'MISSED'}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    chosen = parser.parse_args()
    start(partial(measure, chosen.seconds, chosen.out), chosen.workers)


if __name__ == "__main__":
    main()
