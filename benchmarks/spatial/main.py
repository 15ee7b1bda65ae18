"""A convolution on two workers or four, each with a part of the image, against one: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/spatial/main.py [--processes 2] [--rounds 7] [--sizes 128 256 512] [--out FILE]
"""

import argparse
import copy
import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import stretto
from stretto.measure.busy_cores import busy_seconds

CHANNELS, KERNEL = 64, 3
BATCHES = {128: 32, 256: 8, 512: 2}  # examples, by height and width: 134 MB an image of 64 channels, at each size
ONE, TWO_THREADS = "one worker", "one worker of two threads"
HALVES, SPACE = "parts that do not talk", "spatial"
GRIDS = {2: (2, 1), 4: (2, 2)}  # height x width, by processes
BAR, BARRED = 1.7, 512
LECTURE = {
    2: {128: (1.7, 1.9), 256: (1.9, 2.3), 512: (2.2, 2.1)},
    4: {128: (2.1, 2.8), 256: (3.2, 3.9), 512: (4.2, 4.7)},
}  # its table by processes: V100 against one, batch 32
PASSES = ("forward", "backward", "both")
Times = dict[str, list[tuple[float, float]]]  # seconds of forward and backward in each round, by variant


def start(rank: int, port: int, chosen: argparse.Namespace) -> None:
    """One of the processes."""
    own = {
        "RANK": rank,
        "WORLD_SIZE": chosen.processes,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    mesh = init_device_mesh("cpu", GRIDS[chosen.processes], mesh_dim_names=("height", "width"))
    begin, before = time.perf_counter(), disturbance()
    times = {size: measure(size, batch, chosen.rounds, mesh) for size, batch in BATCHES.items() if size in chosen.sizes}
    others = (disturbance() - before) / (time.perf_counter() - begin)
    if rank == 0:
        write(times, others, chosen)
    dist.barrier()
    dist.destroy_process_group()


def measure(size: int, batch: int, rounds: int, mesh: DeviceMesh) -> Times:
    """All variants, interleaved, in another order each round; a time is that of the slowest process."""
    torch.manual_seed(0)
    plain = nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=KERNEL // 2)
    spatial = stretto.parallel.spatial(copy.deepcopy(plain), mesh)
    image = torch.randn(batch, CHANNELS, size, size)
    slab = stretto.parallel.scatter(image, mesh)
    check(plain, spatial, image[:1], mesh)
    alone = image if dist.get_rank() == 0 else None
    variants: dict[str, tuple[nn.Module, Tensor | None, int]] = {
        ONE: (plain, alone, 1), TWO_THREADS: (plain, alone, 2), HALVES: (plain, slab, 1), SPACE: (spatial, slab, 1),
    }  # fmt: skip
    times: Times = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds + 1):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            taken = seconds(*variants[name])
            if turn:  # the first one warms up
                times[name].append(taken)
    return times


def seconds(module: nn.Module, x: Tensor | None, threads: int) -> tuple[float, float]:
    """Of one forward and one backward, on the slowest process; x is None where this process has no part."""
    torch.set_num_threads(threads)
    taken = torch.zeros(2, dtype=torch.float64)
    gradient = None if x is None else torch.ones_like(x)
    leaf = None if x is None else x.detach().requires_grad_()
    module.zero_grad()
    out = None
    for index in range(2):
        dist.barrier()  # waits without spinning; between the two, or the one's lag would count as the other's time
        begin = time.perf_counter()
        if leaf is not None and index == 0:
            out = module(leaf)
        elif out is not None:
            out.backward(gradient)
        taken[index] = time.perf_counter() - begin
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken[0].item(), taken[1].item()


def check(plain: nn.Module, spatial: nn.Module, image: Tensor, mesh: DeviceMesh) -> None:
    """Output and gradients of one example are those of one worker."""
    whole = image.clone().requires_grad_()
    wanted = plain(whole)
    wanted.square().sum().backward()
    slab = stretto.parallel.scatter(image, mesh).requires_grad_()
    mine = spatial(slab)
    mine.square().sum().backward()
    assert whole.grad is not None
    assert slab.grad is not None
    pairs = [
        (mine, stretto.parallel.scatter(wanted.detach(), mesh)),
        (slab.grad, stretto.parallel.scatter(whole.grad, mesh)),
    ]
    pairs += [(own.grad, right.grad) for own, right in zip(spatial.parameters(), plain.parameters(), strict=True)]
    for own, right in pairs:
        torch.testing.assert_close(own, right, rtol=1e-3, atol=1e-3 * right.abs().max().item())


def disturbance() -> float:
    """CPU seconds that went to other programs of this machine, up to now (Linux)."""
    own = torch.tensor(time.process_time())
    dist.all_reduce(own)
    return busy_seconds() - own.item()


def of(name: str) -> Callable[[tuple[float, float]], float]:
    return {"forward": lambda t: t[0], "backward": lambda t: t[1], "both": sum}[name]


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Milliseconds, and how many times as fast as one worker: medians over rounds."""
    made: dict[str, dict[str, float]] = {}
    for name, each in times.items():
        made[name] = {f"{part}, ms": 1e3 * statistics.median(map(of(part), each)) for part in PASSES}
        for part in PASSES if name != ONE else ():
            pairs = zip(map(of(part), times[ONE]), map(of(part), each), strict=True)
            made[name][f"{part}, times one worker"] = statistics.median(one / two for one, two in pairs)
    return made


def write(times: dict[int, Times], others: float, chosen: argparse.Namespace) -> None:
    figures = {size: summary(each) for size, each in times.items()}
    for size, rows in figures.items():
        print(f"{size}^2, batch {BATCHES[size]}")
        for name, row in rows.items():
            print(f"  {name:<40}" + "".join(f"{value:9.2f}" for value in row.values()))
        forward, backward = LECTURE[chosen.processes][size]
        print(f"  the lecture's {chosen.processes} V100: {forward} forward, {backward} backward")
    if chosen.processes > (os.cpu_count() or 1):
        print("more processes than cores: they take turns, and nothing is concluded from these times")
    elif BARRED in figures and chosen.processes == min(GRIDS):
        judge(figures)
    print(f"other programs used {others:.2f} cores meanwhile")
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    result = {
        "machine": machine,
        "cores used by others": others,
        "batches": BATCHES,
        "figures": figures,
        "seconds": times,
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    if set(figures) == set(BATCHES) and chosen.processes == min(GRIDS):
        draw(figures, chosen.picture)


def judge(figures: dict[int, dict[str, dict[str, float]]]) -> None:
    """Say whether the bar is met."""
    reached = [figures[BARRED][SPACE][f"{part}, times one worker"] for part in PASSES]
    verdict = "met" if min(reached) >= BAR else "MISSED"
    said = ", ".join(f"{part} {value:.2f}" for part, value in zip(PASSES, reached, strict=True))
    print(f"bar {BAR} at {BARRED}^2: {said}: {verdict}")


def draw(figures: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    """Speed-up against size, ours beside the lecture's."""
    import altair as alt

    sources = {
        "ours, two one-thread workers": SPACE,
        "halves that do not talk (ceiling)": HALVES,
        "one worker of two threads": TWO_THREADS,
    }
    rows = [
        {"size": f"{size}²", "pass": part, "speed-up": figures[size][name][f"{part}, times one worker"], "who": who}
        for size in BATCHES for part in PASSES[:2] for who, name in sources.items()
    ] + [
        {"size": f"{size}²", "pass": part, "speed-up": value, "who": "the lecture's table, two V100"}
        for size, pair in LECTURE[2].items() for part, value in zip(PASSES, pair, strict=False)
    ]  # fmt: skip
    who = [*sources, "the lecture's table, two V100"]
    colors, dashes = ["#d55e00", "#747b87", "#009e73", "#0072b2"], [[1, 0], [2, 3], [4, 2], [6, 3]]
    color = alt.Color("who:N", title=None, scale=alt.Scale(domain=who, range=colors),
                      legend=alt.Legend(orient="bottom", columns=2, labelLimit=300))  # fmt: skip
    dash = alt.StrokeDash("who:N", title=None, legend=None, scale=alt.Scale(domain=who, range=dashes))
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("size:O", title="image, pixels", sort=[f"{size}²" for size in BATCHES], axis=alt.Axis(labelAngle=0)),
        y=alt.Y("speed-up:Q", title="times one worker", scale=alt.Scale(domain=[1, 2.4], clamp=True)),
        color=color, strokeDash=dash,
    )  # fmt: skip
    lines = (base.mark_line(strokeWidth=2) + base.mark_point(filled=True, size=60)).properties(width=260, height=200)
    lines.facet(column=alt.Column("pass:N", title=None, sort=list(PASSES[:2]))).save(path)


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--processes", type=int, choices=GRIDS, default=min(GRIDS))
    parser.add_argument("--out", type=Path, help="result.json beside this file; with four processes result-4.json")
    parser.add_argument("--picture", type=Path, default=here / "speedup.svg")
    chosen = parser.parse_args()
    chosen.out = chosen.out or here / ("result.json" if chosen.processes == min(GRIDS) else "result-4.json")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(start, (store.port, chosen), nprocs=chosen.processes, daemon=True)


if __name__ == "__main__":
    main()
