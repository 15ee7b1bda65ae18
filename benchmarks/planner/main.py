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
import torch

from stretto.cli.planning import KEEP
from stretto.cost import Cluster, find_cluster
from stretto.plan import Problem, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.cuts import best_cut
from stretto.plan.objective import Goal, Objective
from stretto.plan.partition import partition
from stretto.plan.search_space import candidates
from stretto.settings.runs import TrainSettings
from stretto.study.model_costs import Costed, CostRequest, TensorFormat, costed

ROUNDS = 5
LAYERS, DEVICES = 100, 64
CLUSTER, BATCH = "128-nodes-of-8-h100", 1536
GOALS: tuple[Goal, ...] = ("step", "money", "energy")
DECODER = {"depth": 96, "width": 12288, "heads": 96, "context": 2048, "vocabulary": 51200}
BARS = {"partition": 1.0, "gpt3-175b": 3.0, "costs": 2.0}  # seconds
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
    """GPT-3 175B on 1,024 GPUs, in every form that `stretto plan` counts; and a decoder as large, counted alone."""
    clock, cpu, model = timed(lambda: counted("gpt3-175b", {}))
    problem = Problem(
        costs=model.costs, cluster=cluster, workers=1024, batch_sizes=(BATCH,), optimizer="adam", masters=True,
        tensor_costs=model.tensor_costs, form_costs=model.form_costs, weight_products=True,
    )  # fmt: skip
    some = list(candidates(problem))[::400]
    prices = Prices(problem)
    places = [prices.places_of(c) for c in some]
    rates = [Objective().rates(*pair) for pair in zip(some, places, strict=True)]
    alone = timed(
        lambda: [
            best_cut(c, prices.tables(c), rate, place.memory)
            for c, rate, place in zip(some, rates, places, strict=True)
        ]
    )
    decoder = timed(lambda: counted("decoder", DECODER))
    return {
        "costs": {"seconds": clock, "cpu": cpu},
        "costs of a decoder": {"seconds": decoder[0], "cpu": decoder[1]},
        "ms a configuration, priced and cut without bounds": 1e3 * alone[1] / len(some),
        **{goal: searched(problem, goal) for goal in GOALS},
    }


def counted(name: str, options: dict[str, object]) -> Costed:
    """All forms of a network's layers on nodes of 8: tensor axes, divided sequences, selective recomputation."""
    asked = CostRequest(heads=(), sharing=(2, 4, 8), selective=True, sequence=True, format=TensorFormat("bfloat16"))
    return costed(TrainSettings(model=name, model_options=options), asked)


def searched(problem: Problem, goal: Goal) -> dict[str, object]:
    """Three searches for one objective, as `stretto plan` makes them."""
    rounds = [timed(lambda: search(problem, Objective(goal=goal), keep=KEEP)) for _ in range(3)]
    found = rounds[0][2]
    best, c = found.best, found.best.candidate
    return {
        "search": summary([each[:2] for each in rounds]),
        "candidates": found.candidates,
        "priced": found.priced,
        "ms a configuration": 1e3 * statistics.median(each[1] for each in rounds) / found.candidates,
        "plan": {
            "method": str(c), "pipeline": c.pipeline, "tensor": c.mesh.tensor, "data": c.mesh.data,
            "sequence": c.sequence, "recompute": c.recompute, "sharding": c.shard, "seconds": best.seconds,
            "bytes": max(best.bytes),
        },
    }  # fmt: skip


def summary(times: list[tuple[float, float]]) -> dict[str, float]:
    clocks, cpus = zip(*times, strict=True)
    return {"seconds": statistics.median(clocks), "cpu": statistics.median(cpus)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    given = parser.parse_args()

    machine = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
    result = {
        "machine": machine, "bars, seconds": BARS, "published peers": PEERS, "partition": partitions(),
        "gpt3-175b on 1,024 GPUs": networks(find_cluster(CLUSTER)),
    }  # fmt: skip
    given.out.write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
