"""How long the planner takes: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/planner/main.py [--out result.json]
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from stretto.cost import Cluster, find_cluster
from stretto.plan import Problem, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.partition import partition
from stretto.plan.search_space import candidates
from stretto.study.model_costs import costed
from stretto.study.tensor_format import TensorFormat

ROUNDS = 5
LAYERS, DEVICES = 100, 64
CLUSTER, BATCH = "128-nodes-of-8-h100", 1536
BARS = {"partition": 1.0, "gpt3-175b": 10.0}  # seconds
PEERS = {"Calculon, ms a configuration": 2.0, "AutoParallel, s, Llama-3-8B on 64 GPUs": 51.6}  # published


def timed(call: Callable[[], object]) -> tuple[float, float, object]:
    """Seconds on the clock, CPU seconds, and what came of it."""
    clock, cpu = time.perf_counter(), time.process_time()
    made = call()
    return time.perf_counter() - clock, time.process_time() - cpu, made


def partitions() -> dict[str, object]:
    """100 layers on 64 devices, every stage and every run of layers at a price of its own."""
    found = {}
    for name, filled in (("bottleneck", False), ("sum of fills and bottleneck", True)):
        times = []
        for seed in range(ROUNDS):
            rng = np.random.default_rng(seed)
            load = rng.uniform(1, 2, (DEVICES, LAYERS + 1, LAYERS + 1))
            load[:, np.tril(np.ones(load.shape[1:], dtype=bool))] = np.inf
            fill = rng.uniform(1, 2, load.shape)
            times.append(timed(partial(partition, load, fill if filled else None))[:2])
        found[name] = summary(times)
    return found


def networks(cluster: Cluster) -> dict[str, object]:
    """GPT-3 175B on 1,024 GPUs."""
    format = TensorFormat("bfloat16")
    clock, cpu, model = timed(lambda: costed("gpt3-175b", {}, "", {}, "auto", format=format, heads=()))
    problem = Problem(
        costs=model.costs, cluster=cluster, workers=1024, batch_sizes=(BATCH,), optimizer="adam", masters=True
    )
    rounds = [timed(lambda: search(problem)) for _ in range(3)]
    found = rounds[0][2]
    prices = Prices(problem)
    some = list(candidates(problem))[::400]
    alone = timed(lambda: [prices.cut(c, prices.tables(c)) for c in some])
    best, c = found.best, found.best.candidate
    return {
        "costs": {"seconds": clock, "cpu": cpu},
        "search": summary([each[:2] for each in rounds]),
        "candidates": found.candidates,
        "priced": found.priced,
        "ms a configuration": 1e3 * statistics.median(each[1] for each in rounds) / found.candidates,
        "ms a configuration, priced and cut without bounds": 1e3 * alone[1] / len(some),
        "plan": {
            "method": str(c), "pipeline": c.pipeline, "tensor": c.mesh.tensor, "data": c.mesh.data,
            "sharding": c.shard, "seconds": best.seconds, "bytes": max(best.bytes),
        },
    }  # fmt: skip


def summary(times: list[tuple[float, float]]) -> dict[str, float]:
    clocks, cpus = zip(*times, strict=True)
    return {"seconds": statistics.median(clocks), "cpu": statistics.median(cpus)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    given = parser.parse_args()
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    result = {
        "machine": machine, "bars, seconds": BARS, "published peers": PEERS, "partition": partitions(),
        "gpt3-175b on 1,024 GPUs": networks(find_cluster(CLUSTER)),
    }  # fmt: skip
    given.out.write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
