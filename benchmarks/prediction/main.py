"""What a step is predicted to take, in time and memory, beside what it takes on two workers: see README.md here.

OMP_NUM_THREADS=1 python benchmarks/prediction/main.py [--rounds 9] [--only TEXT] [--out result.json]
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from layers import Gauge
from networks import NETWORKS

import stretto.runtime
from stretto.cost import Cluster, LayerCost, ModelCosts
from stretto.measure.machine_calibration import (
    PASSED,
    SIZES,
    Findings,
    Times,
    cluster_of,
    measure_machine,
    messages,
    passages,
)
from stretto.measure.messages import Passage
from stretto.measure.overhead import Overhead, measure_overhead
from stretto.methods import definition as find_method
from stretto.runtime.process_memory import peak_memory
from stretto.schedule.even_split import part_sizes

SHARED = Path(__file__).parent.parent / "shared"
sys.path[:0] = [str(SHARED), str(Path(__file__).parents[2] / "tests")]
from teams import Team, Wire, laid, probe, spread  # noqa: E402

from forecasts import Forecast, forecast  # noqa: E402

WARM, STEPS, LASTING = 2, (5, 12), 0.4  # steps before the clock starts; at least, at most, and seconds of those after
SAMPLES = 2  # of a configuration in each round
STEADY, ATTEMPTS = 0.1, 8  # the layers take that much longer before or after, or it is tried again so often
BARS = {"mean": 0.05, "worst": 0.12, "memory": 0.05, "under": 0.03, "regret": 0.03, "rank": 0.95}
Timed = tuple[ModelCosts, list[LayerCost]]  # layers, and heads
Layers = tuple[str, int, tuple[int, ...] | None]  # a network's, a micro-batch's examples, bounds where heads are wanted


class Configuration(NamedTuple):
    """A network trained by a method in so many stages, on two processes of one host or on two hosts."""

    network: str
    method: str
    stages: int = 2
    wire: Wire | None = None

    @property
    def bounds(self) -> list[int]:
        """Layers cut as torch.tensor_split cuts."""
        sizes = part_sizes(len(NETWORKS[self.network].layers), self.stages)
        return [sum(sizes[:s]) for s in range(self.stages + 1)]

    @property
    def share(self) -> int:
        """Examples of a micro-batch."""
        return NETWORKS[self.network].batch // find_method(self.method).plan(self.stages, 2)[0].per_turn

    @property
    def has_heads(self) -> bool:
        """Whether a stage below the last has a loss of its own."""
        return self.method == "greedy"

    @property
    def layers(self) -> "Layers":
        """What has to be measured for it."""
        return self.network, self.share, tuple(self.bounds) if self.has_heads else None

    def __str__(self) -> str:
        where = "" if self.wire is None else f", {self.wire.megabits} Mbit/s"
        return f"{self.network}, {self.method}, {self.stages} stages{where}"


NARROW = Wire("narrow", 400)
CONFIGURATIONS = (
    Configuration("mlp 8 x 448", "gpipe(microbatches=2)"),
    Configuration("mlp 8 x 448", "1f1b(microbatches=4)"),
    Configuration("mlp 8 x 448", "pb"),
    Configuration("mlp 8 x 448", "greedy"),
    Configuration("mlp 8 x 1152", "1f1b(microbatches=2)"),
    Configuration("mlp 8 x 1152", "zb-h1(microbatches=4)"),
    Configuration("mlp 8 x 1152", "pipedream"),
    Configuration("mlp 8 x 1152", "pb", 4),
    Configuration("mlp 8 x 1152", "overlapping(delay=1)"),
    Configuration("residual", "gpipe(microbatches=4)"),
    Configuration("residual", "1f1b(microbatches=2)"),
    Configuration("residual", "pipedream-2bw(microbatches=2)"),
    Configuration("residual", "pb"),
    Configuration("language", "interleaved(microbatches=4)", 4),
    Configuration("language", "1f1b(microbatches=4)"),
    Configuration("language", "pb"),
    Configuration("language", "greedy"),
    Configuration("mlp 8 x 448", "gpipe(microbatches=2)", wire=NARROW),
    Configuration("mlp 8 x 448", "1f1b(microbatches=4)", wire=NARROW),
    Configuration("mlp 8 x 448", "pb", wire=NARROW),
    Configuration("mlp 8 x 448", "greedy", wire=NARROW),
    Configuration("residual", "1f1b(microbatches=2)", wire=NARROW),
    Configuration("language", "1f1b(microbatches=4)", wire=NARROW),
    Configuration("language", "pb", wire=NARROW),
)


class Sample(NamedTuple):
    """One round of a configuration: its layers on both cores, before and after; a step; probes; and how steady it was.

    `change` is how much longer the layers took on a core at one time than at the other.
    """

    layers: tuple[list[Timed], list[Timed]]
    seconds: float
    probes: list[float]
    change: float

    @property
    def speed(self) -> float:
        """What the probe took, on both cores."""
        return statistics.fmean(self.probes)


@dataclass
class Measurement:
    """All that was measured, round by round; messages by what they went through."""

    machine: list[Findings] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)
    messages: dict[Wire | None, list[tuple[Times, Sequence[Passage]]]] = field(default_factory=dict)
    samples: dict[Configuration, list[Sample]] = field(default_factory=dict)
    bytes: dict[Configuration, list[int]] = field(default_factory=dict)


def trainer_of(c: Configuration) -> Callable[[], Callable[[], object]]:
    """Builds a worker of a configuration, whose batch is made already, and gives its step."""
    net = NETWORKS[c.network]
    torch.manual_seed(1)
    x, y = net.inputs(net.batch), net.targets(net.batch)

    def build() -> Callable[[], object]:
        trainer = stretto.Trainer(
            net.stages(c.bounds), net.loss, net.step, c.method, example=x[:2], workers=2, device="cpu"
        )
        for _ in range(3 * c.stages + 2):  # until it is full
            trainer.step(x, y)
        return lambda: trainer.step(x, y)

    return build


def train(c: Configuration) -> tuple[None, Callable[[int], tuple[float, list[float]]]]:
    """A worker of a configuration: median seconds of steps whenever it is asked for some; probes before and after."""
    step = trainer_of(c)()

    def answer(steps: int) -> tuple[float, list[float]]:
        dist.barrier()  # waits without spinning
        before = probe()
        for _ in range(WARM):
            step()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        dist.barrier()
        return statistics.median(seconds), [before, probe()]

    return None, answer


def remember(c: Configuration) -> tuple[int, Callable[[Any], Any]]:
    """The same in other processes, which tell the most memory they took: torch's profiler is not for those we time."""
    build = trainer_of(c)
    with peak_memory() as peak:
        step = build()
    del step
    return peak.bytes, lambda asked: asked


def calibrate() -> tuple[None, Callable[[str], Any]]:
    """Two processes that calibrate, as a user would."""
    member = stretto.runtime.membership()
    assert member is not None
    world = dist.group.WORLD
    assert world is not None

    def answer(asked: str) -> Any:
        dist.barrier()
        if asked == "machine":
            return measure_machine(per_node=2, quick=False, load=os.getloadavg()[0], tell=lambda: None)
        sent, passed = messages(0, 1, SIZES), passages(0, 1, PASSED)
        return (sent, passed), measure_overhead(world, passed[0])

    return None, answer


def gauge() -> tuple[None, Callable[[Layers], tuple[Timed, list[float]]]]:
    """Two processes that measure the layers of networks, both at the same time, with probes before and after."""
    known: dict[Layers, Gauge] = {}

    def answer(layers: Layers) -> tuple[Timed, list[float]]:
        if layers not in known:
            network, share, bounds = layers
            known[layers] = Gauge(NETWORKS[network], bounds, share)
        dist.barrier()
        before, timed = probe(), known[layers].measure()
        dist.barrier()
        return timed, [before, probe()]

    return None, answer


def measure(mine: Sequence[Configuration], rounds: int) -> Iterator[Measurement]:
    """Calibrate, then measure configurations beside their layers, in changing order; after each round, all so far."""
    found = Measurement(samples={c: [] for c in mine})
    for c in mine:
        say(f"memory: {c}")
        if c.wire is None:
            pair = Team(partial(remember, c))
            found.bytes[c] = pair.ready
            pair.end()
    say("starting")
    meter = Team(gauge)
    pairs = {c: Team(partial(train, c), c.wire) for c in mine}
    transports = {wire: Team(calibrate, wire) for wire in {None, *(c.wire for c in mine)}}
    say("calibrating")
    found.machine.append(transports[None].ask("machine")[0])
    for turn in range(rounds):
        for wire, pair in transports.items():
            say(f"round {turn + 1} of {rounds}: messages")
            told, overhead = pair.ask("transport")[0]
            found.messages.setdefault(wire, []).append(told)
            found.overhead += [overhead] if wire is None else []
        for c in shifted(mine, 3 * turn):
            say(f"round {turn + 1} of {rounds}: {c}")
            found.samples[c] += sampled(meter, pairs[c], c, found.samples[c])
        yield found


def sampled(meter: Team, pair: Team, c: Configuration, known: Sequence[Sample]) -> list[Sample]:
    """Layers, some steps, the layers again, while neither core changes its speed: the steadiest of some attempts."""
    seconds = min((each.seconds for each in known), default=LASTING)
    number = max(STEPS[0], min(STEPS[1], round(LASTING / seconds)))
    attempts: list[Sample] = []
    now = meter.ask(c.layers)
    while len(attempts) < ATTEMPTS and sum(each.change < STEADY for each in attempts) < SAMPLES:
        before, steps, now = now, pair.ask(number), meter.ask(c.layers)
        probes = [each for _, own in (*before, *steps, *now) for each in own]
        timed = tuple([each for each, _ in answer] for answer in (before, now))
        attempts.append(Sample(timed, max(each for each, _ in steps), probes, changed(*timed, c.share)))
    return sorted(attempts, key=lambda each: each.change)[:SAMPLES]


def changed(before: Sequence[Timed], after: Sequence[Timed], examples: float) -> float:
    """How much longer the layers took on a core at one time than at the other."""
    return max(spread([total(each, examples) for each in own]) for own in zip(before, after, strict=True))


def total(timed: Timed, examples: float) -> float:
    """Seconds of all layers: a micro-batch forth and back, and the update."""
    rows = [row.measured for row in timed[0].layers if row.measured is not None]
    return sum(row.forward.at(examples) + row.backward.at(examples) + (row.update or 0.0) for row in rows)


def shifted(items: Sequence[Any], by: int) -> list[Any]:
    """Beginning with another one."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def say(text: str) -> None:
    print(f"{text:<60}", end="\r", file=sys.stderr, flush=True)


def placed(c: Configuration, timed: Sequence[Timed]) -> Timed:
    """Each layer, and each head, as it was measured on the core of its worker: cores differ from moment to moment."""
    homes = find_method(c.method).plan(c.stages, 2)[0].worker_of
    stage_of = [bisect(c.bounds[1:-1], layer) for layer in range(c.bounds[-1])]
    homes_of = [homes[stage] for stage in [*stage_of, c.stages - 1]]  # the last one is the loss
    layers = tuple(timed[home][0].layers[index] for index, home in enumerate(homes_of))
    start, step = (statistics.fmean(getattr(each, key) for each, _ in timed) for key in ("start", "step"))
    heads = [timed[homes[stage]][1][stage] for stage in range(len(timed[0][1]))]
    return replace(timed[0][0], layers=layers, start=start, step=step), heads


def findings_of(found: Measurement, wire: Wire | None) -> Findings:
    """The calibration, with the medians of what was measured in several rounds."""
    told = found.messages[wire]
    sent = tuple(
        (row[0][0], statistics.median(each for _, each in row)) for row in zip(*(s for s, _ in told), strict=True)
    )
    rows = zip(*(passed for _, passed in told), strict=True)
    passed = tuple(Passage(*(statistics.median(column) for column in zip(*row, strict=True))) for row in rows)
    overhead = Overhead(*(statistics.median(column) for column in zip(*found.overhead, strict=True)))
    return replace(found.machine[0], within=sent, within_passages=passed, overhead=overhead)


def evaluate(found: Measurement) -> dict[str, Any]:
    """Predicted beside measured, for each configuration and over all.

    The cores' speed changes from second to second, so a sample is predicted from the layers that were measured in it;
    an error is the median over samples. Noise: how far the errors of every other round are from those of the rest; and
    the same of the measured times. Configurations are compared as if all had run while the cores were fast: predicted
    from the layers' times then, and measured as far from that as in the samples.
    """
    clusters = {wire: cluster_of(findings_of(found, wire)) for wire in found.messages}
    rows: dict[str, dict[str, Any]] = {}
    for c, samples in found.samples.items():
        told = [mean([predicted(c, placed(c, timed), clusters[c.wire]) for timed in each.layers]) for each in samples]
        seconds = [sample.seconds for sample in samples]
        errors = [each.seconds / measured - 1 for each, measured in zip(told, seconds, strict=True)]
        reference = predicted(c, placed(c, at_full_speed(found, c.layers)), clusters[c.wire]).seconds
        rows[str(c)] = {
            "predicted ms": 1e3 * statistics.median(each.seconds for each in told),
            "measured ms": 1e3 * statistics.median(seconds),
            "error": statistics.median(errors),
            "noise": apart(errors, lambda one, other: one - other),
            "noise of times": apart(seconds, lambda one, other: one / other - 1),
            "compared ms": [1e3 * reference, 1e3 * reference / (1 + statistics.median(errors))],
            "unsteady": sum(sample.change >= STEADY for sample in samples),
            "predicted MB": [1e-6 * each for each in told[0].bytes],
        }
        if c in found.bytes:
            rows[str(c)] |= {
                "measured MB": [1e-6 * each for each in found.bytes[c]],
                "memory errors": [p / m - 1 for p, m in zip(told[0].bytes, found.bytes[c], strict=True)],
            }
    return {"configurations": rows, "summary": summary(rows, found)}


def apart(values: Sequence[float], how: Callable[[float, float], float]) -> float:
    """How far the medians of every other round's values and of the rest lie apart."""
    halves: list[list[float]] = [[], []]
    for index, value in enumerate(values):
        halves[index // SAMPLES % 2].append(value)
    return abs(how(statistics.median(halves[0]), statistics.median(halves[1] or halves[0])))


def predicted(c: Configuration, timed: Timed, cluster: Cluster) -> Forecast:
    """What the product says of a configuration."""
    layers, heads = timed
    bounds = [*c.bounds[:-1], c.bounds[-1] + 1]  # the last stage has the loss
    net, behind = NETWORKS[c.network], [*heads, None] if c.has_heads else None
    return forecast(layers, bounds, cluster, c.method, net.batch, workers=2, heads=behind, optimizer=net.optimizer)


def at_full_speed(found: Measurement, layers: Layers) -> list[Timed]:
    """The layers on each core as a quarter of their measurements had them, or faster."""
    known = [timed for c, own in found.samples.items() if c.layers == layers for each in own for timed in each.layers]
    return [sorted(own, key=lambda timed: total(timed, layers[1]))[len(own) // 4] for own in zip(*known, strict=True)]


def mean(told: Sequence[Forecast]) -> Forecast:
    """Forecasts that differ in their time."""
    return replace(told[0], seconds=statistics.fmean(each.seconds for each in told))


def summary(rows: dict[str, dict[str, Any]], found: Measurement) -> dict[str, float]:
    """The errors over all configurations, signs kept where they matter."""
    errors = [abs(row["error"]) for row in rows.values()]
    memory = [each for row in rows.values() for each in row.get("memory errors", ())]
    told, measured = ([row[key] for row in rows.values()] for key in ("predicted ms", "measured ms"))
    samples = [sample for each in found.samples.values() for sample in each]
    return {
        "mean": statistics.fmean(errors),
        "worst": max(errors),
        "memory": max(map(abs, memory), default=0.0),
        "under": -min(0.0, *memory, 0.0),
        "rank": rank(*zip(*(row["compared ms"] for row in rows.values()), strict=True)),
        "regret": max(
            regret([rows[str(c)] for c in found.samples if (c.network, c.wire) == where])
            for where in {(c.network, c.wire) for c in found.samples}
        ),
        "mean, of medians": statistics.fmean(abs(p / m - 1) for p, m in zip(told, measured, strict=True)),
        "worst, of medians": max(abs(p / m - 1) for p, m in zip(told, measured, strict=True)),
        "noise": statistics.fmean(row["noise"] for row in rows.values()),
        "noise of times": statistics.fmean(row["noise of times"] for row in rows.values()),
        "unsteady": sum(row["unsteady"] for row in rows.values()) / len(samples),
        "cores, slowest to fastest": spread([sample.speed for sample in samples]),
    }


def rank(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rho."""
    if len(one) < 3:
        return 1.0
    places = [[sorted(each).index(value) for value in each] for each in (one, other)]
    return statistics.correlation(*places)


def regret(rows: Sequence[dict[str, Any]]) -> float:
    """How much slower than the fastest the one is that was predicted to be, of configurations that train the same."""
    chosen = min(rows, key=lambda row: row["compared ms"][0])
    return chosen["compared ms"][1] / min(row["compared ms"][1] for row in rows) - 1


def tell(result: dict[str, Any]) -> None:
    """Print it."""
    print(f"{'':<52} predicted  measured   error   noise  of times   memory of workers, MB")
    for name, row in result["configurations"].items():
        pairs = zip(row["predicted MB"], row.get("memory errors", ()), strict=False)
        memory = "  ".join(f"{p:6.2f} ({e:+.1%})" for p, e in pairs)
        times = f"{row['predicted ms']:9.1f} {row['measured ms']:9.1f}  {row['error']:+6.1%}"
        print(f"{name:<52} {times}   {row['noise']:5.1%}   {row['noise of times']:6.1%}   {memory}")
    for key, value in result["summary"].items():
        print(f"{key:<19} {value:.3f}  {verdict(key, value)}")


def verdict(key: str, value: float) -> str:
    """Whether the bar is met, if there is one."""
    if key not in BARS:
        return ""
    met = value >= BARS[key] if key == "rank" else value <= BARS[key]
    return f"bar {BARS[key]:g}: {'met' if met else 'MISSED'}"


def machine_facts() -> dict[str, Any]:
    """What this ran on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine(),
            "processor": "".join(models[:1]), "cores": os.cpu_count()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, choices=range(1, 100), metavar="1..99")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    chosen = parser.parse_args()
    ours = (str(Path(__file__).parent), str(SHARED), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(ours)
    mp.set_forkserver_preload(
        ["torch", "stretto.trainer.distributed", "stretto.measure.machine_calibration", "layers", "teams"]
    )
    begin, load = time.perf_counter(), os.getloadavg()[0]
    mine = [c for c in CONFIGURATIONS if chosen.only in str(c)]
    with contextlib.ExitStack() as stack:
        try:
            for wire in {c.wire for c in mine if c.wire is not None}:
                stack.enter_context(laid(wire))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no configurations on two hosts: they want root rights, ip and tc ({error})", file=sys.stderr)
            mine = [c for c in mine if c.wire is None]
        for found in measure(mine, chosen.rounds):
            result = evaluate(found)
            facts = machine_facts() | {"load when it began": load, "seconds": time.perf_counter() - begin}
            samples = {
                str(c): {"seconds": [each.seconds for each in own], "probe": [each.speed for each in own]}
                for c, own in found.samples.items()
            }
            told = {"machine": facts, **result, "samples": samples}
            chosen.out.write_text(json.dumps(told, indent=1) + "\n")
    tell(result)


if __name__ == "__main__":
    main()
