"""How fast the simulator is: see README.md in this folder.

OMP_NUM_THREADS=1 python benchmarks/simulator/main.py [--rounds 5] [--out result.json] [--small]
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import stretto
from stretto.schedule import Reach, Rules, Schedule
from stretto.schedule.library.pipedream import pipedream, pipelined_backprop
from stretto.schedule.lower import lower
from stretto.simulate import Link, Network, PeriodicTimeline, Transport, simulate_periodic, unit_costs
from stretto.simulate.engine import compiled, execute, transfers
from stretto.simulate.simulator import table_of

Plan = tuple[Schedule, Rules]
NETWORKS = {
    "no lanes": Network(Link(0.25)),
    "lanes": Network(Link(0.25, 0.25)),
    "lanes, one shared link": Network(Link(0.25, 1 / 64, "bus")),
}
BARS = {"no lanes": 5e6, "lanes": 1e6, "lanes, one shared link": 1e6}


def plan(make: Callable[[int, int], Schedule], workers: int) -> Plan:
    """A pipeline without the check that methods make of their plans, which runs it twice, in Python."""
    schedule = make(workers, workers)
    return schedule, Rules.of(schedule, Reach((*[None] * (workers - 1), workers - 1)))


def seconds(run: Callable[[], object], rounds: int) -> dict[str, float]:
    """The median of the rounds, by the clock and by the processor's time, which other programs' load spares."""
    walls, processors = [], []
    for _ in range(rounds):
        wall, processor = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return {"wall": statistics.median(walls), "processor": statistics.median(processors), "least": min(processors)}


def speed(name: str, plan: Plan, turns: int, rounds: int) -> list[dict[str, object]]:
    """Actions a second of full simulations, once the schedule is lowered."""
    rows: list[dict[str, object]] = []
    lowered = lower(*plan)
    table = table_of(lowered, unit_costs)
    for network, links in NETWORKS.items():
        for sends in ("buffered", "rendezvous") if network != "no lanes" else ("buffered",):
            moves = transfers(lowered, Transport(network=links, sizes=lambda edge: 1.0, sends=sends))
            took = seconds(lambda moves=moves: execute(lowered, turns, table, moves), rounds)  # type: ignore[misc]
            actions = len(lowered.actions) * turns
            row = {"schedule": name, "workers": len(plan[0].body), "network": network, "sends": sends}
            rows.append({**row, "actions": actions, "seconds": took, "rate": actions / took["processor"]})
            rate = f"{actions / took['processor'] / 1e6:6.2f} million a second, bar {BARS[network] / 1e6:g}"
            print(f"{name:<22} {len(plan[0].body):>5} workers, {network:<23} {sends:<10} {rate}")
    return rows


def large(name: str, plan: Plan, turns: int, links: Network, rounds: int) -> dict[str, object]:
    """Many workers and micro-batches through the periodic part, and whether it equals the full simulation."""
    timelines: list[PeriodicTimeline] = []
    transport = Transport(network=links, sizes=lambda edge: 1.0)
    took = seconds(lambda: timelines.append(simulate_periodic(*plan, turns, transport=transport)), rounds)
    last = timelines[-1]
    lowered = last.timeline.lowered
    full = execute(lowered, turns, last.timeline.outcome.durations, last.timeline.transfers)
    equal = all(
        np.array_equal(getattr(last.full.outcome, name), getattr(full, name)) for name in ("starts", "sent", "arrivals")
    )
    simulated = last.timeline.outcome.turns
    times = f"{took['processor']:.2f} s of processor, {took['wall']:.2f} s by the clock"
    same = "equal to" if equal else "DIFFERENT FROM"
    print(f"{name:<22} {len(plan[0].body)} workers x {turns}: {times}, {simulated} turns, {same} the full simulation")
    return {"schedule": name, "workers": len(plan[0].body), "microbatches": turns, "seconds": took, "equal": equal,
            "turns_simulated": simulated, "makespan": last.makespan}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a thousand times less of everything: does it run?")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    chosen = parser.parse_args()
    shrink = 1000 if chosen.small else 1
    narrow, wide = plan(pipelined_backprop, 8), plan(pipedream, 1024 // min(shrink, 64))
    one = stretto.method("1f1b(microbatches=32)").plan(8, 8)
    lowered = lower(*narrow)
    execute(lowered, 15_000 // shrink, table_of(lowered, unit_costs), transfers(lowered, Transport()))  # loads it
    rows = speed("pb", narrow, 100_000 // shrink, chosen.rounds)
    rows += speed("1f1b, 32 micro-batches", one, max(1, 4000 // shrink), chosen.rounds)
    rows += speed("pipedream", wide, 4096 // min(shrink, 64), chosen.rounds)
    big = []
    for name, make in (("pipedream", pipedream), ("pb", pipelined_backprop)):
        for label, links in (("", Network()), (", lanes", NETWORKS["lanes"])):
            made = plan(make, 1024 // min(shrink, 64))
            big.append(large(name + label, made, 4096 // min(shrink, 16), links, chosen.rounds))
    machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
               "numba": importlib.metadata.version("numba") if compiled() else None}  # fmt: skip
    chosen.out.write_text(json.dumps({"machine": machine, "speed": rows, "large": big}, indent=1) + "\n")


if __name__ == "__main__":
    main()
