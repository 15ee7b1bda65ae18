"""What `stretto plan` promises beside what `stretto train --plan` takes, as a user meets both: see README.md here.

OMP_NUM_THREADS=1 python benchmarks/prediction/road.py [--held-out | --unseen | --unseen-2 | --optimizers] [--rounds 3]
    [--only PATTERN] [--memory] [--out road.json]
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stretto.cli.program import main as command_line
from stretto.runtime.launch import LaunchSettings
from stretto.runtime.process_memory import peak_memory
from stretto.study.prepare import dataset, prepare, resolve
from stretto.study.run_processes import start
from stretto.study.training_run import training_batches
from stretto.study.trial_processes import settings_of
from stretto.system import fork_server

HERE = Path(__file__).parent
OWN, OWN_2 = HERE / "own.py", HERE / "own_2.py"
BARS = {"mean": 0.06, "worst": 0.2, "memory": 0.05, "regret": 0.05, "regret of trials": 0.02, "rank": 0.95}
LASTING, STEPS = 1.2, (16, 300)  # seconds of a run's steps, about; the fewest and the most


def own(model: str, data: str, batch: int, file: Path = OWN) -> list[str]:
    """A user's module and data."""
    return [
        "--model",
        f"{file}:{model}",
        "--data",
        f"{file}:{data}",
        "--loss",
        "cross_entropy",
        "--batch-size",
        str(batch),
    ]


LOOKED_AT = {
    "mlp": ["--model", "mlp"],
    "cnn": ["--model", "cnn"],
    "transformer": ["--model", "transformer"],
    "mlp 8 x 1024": ["--model", "mlp", "--model-options.width", "1024", "--batch-size", "256"],
    "own residual": own("residual", "vectors", 128),
    "own convolutions": own("convolutions", "images", 64),
}
HELD_OUT = {
    "mlp 8 x 96": ["--model", "mlp", "--model-options.width", "96", "--batch-size", "48"],
    "cnn, 64 examples": ["--model", "cnn", "--batch-size", "64"],
    "transformer 128": ["--model", "transformer", "--model-options.width", "128", "--batch-size", "16"],
    "mlp 8 x 640": ["--model", "mlp", "--model-options.width", "640", "--batch-size", "192"],
    "own deep": own("deep", "vectors", 256),
    "own large kernels": own("large_kernels", "images", 32),
}
UNSEEN = {  # written after the rule that the plainest of equal plans wins, and looked at once
    "own encoder": own("encoder", "images", 32),
    "own depthwise": own("depthwise", "images", 64),
    "own wide": own("wide", "vectors", 512),
    "own mixer": own("mixer", "images", 128),
    "own recurrent": own("recurrent", "vectors", 64),
}
UNSEEN_2 = {  # by another writer, after the rule that a method other than the measured one has a spread of 10 %
    "own unet": own("unet", "images", 16, OWN_2),
    "own gated": own("gated", "vectors", 192, OWN_2),
    "own vision": own("vision", "images", 32, OWN_2),
    "own dilated": own("dilated", "sequences", 96, OWN_2),
    "own bulges": own("bulges", "vectors", 512, OWN_2),
}
OPTIMIZERS = {
    "transformer, muon": ["--model", "transformer", "--optimizer", "muon"],
    "transformer, soap": ["--model", "transformer", "--optimizer", "soap"],
    "mlp 8 x 256, muon": ["--model", "mlp", "--model-options.width", "256", "--optimizer", "muon"],
    "transformer, adamw": ["--model", "transformer", "--optimizer", "adamw"],
}
ALONE = ["--pipeline", "1", "--data-parallel", "1", "--tensor", "1", "--space", "1,1", "--sharding", "none"]
CONFIGURATIONS = {
    "one worker": ["--methods", "backprop", *ALONE],
    "replicas": [*ALONE, "--methods", "backprop", "--data-parallel", "2"],
    "fully-shard": [*ALONE, "--methods", "backprop", "--data-parallel", "2", "--sharding", "fully-shard"],
    "tensor": [*ALONE, "--methods", "backprop", "--tensor", "2"],
    "space": [*ALONE, "--methods", "backprop", "--space", "2,1"],
    "gpipe": [*ALONE, "--methods", "gpipe", "--pipeline", "2", "--microbatches", "2"],
    "1f1b": [*ALONE, "--methods", "1f1b", "--pipeline", "2", "--microbatches", "4"],
    "pb": [*ALONE, "--methods", "pb", "--pipeline", "2", "--stages", "2"],
    "pipedream": [*ALONE, "--methods", "pipedream", "--pipeline", "2", "--stages", "2"],
    "greedy": [*ALONE, "--methods", "greedy", "--pipeline", "2", "--stages", "2"],
}

ROTATED = {  # refused for the optimizers that it does not take
    "rotated": [*ALONE, "--methods", "pipedream(rotate=True)", "--pipeline", "2", "--stages", "2"],
    "one-sided": [*ALONE, "--methods", "pipedream(rotate=one-sided)", "--pipeline", "2", "--stages", "2"],
}
CHOICES = {
    "chosen": ["--methods", "all"],
    "tried": ["--methods", "all", "--try", "4"],
}  # what is planned without limits


class Case(NamedTuple):
    """A network, and one way to train it."""

    network: str
    configuration: str

    def __str__(self) -> str:
        return f"{self.network}, {self.configuration}"


@dataclass
class Row:
    """What was promised of a case, and what runs took; bytes of the fullest worker. `way` is what a choice chose.

    `layers` is what measured layers promise without whole steps, `rates` what the calibration promises alone.
    """

    file: Path
    predicted: float
    layers: float
    rates: float
    bytes: float
    doubts: Sequence[str]
    way: str
    spread: float | None = None
    seconds: list[float] = field(default_factory=list)
    peak: float | None = None


def stretto(*words: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command."""
    command = [sys.executable, "-m", "stretto", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def in_this_process(*words: object) -> tuple[int, str, str]:
    """The same without a new process, for commands that time nothing here: the interpreter starts once."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = command_line([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def options_of(words: Sequence[str]) -> list[str]:
    """Words of which the last value of a repeated option counts."""
    values = dict(zip(words[::2], words[1::2], strict=True))
    return [word for pair in values.items() for word in pair]


def promised(
    network: str, words: Sequence[str], chosen: argparse.Namespace, folder: Path
) -> tuple[dict[Case, Row], dict[str, str]]:
    """A plan for each way to train a network, those without limits too, and why others have none."""
    rows: dict[Case, Row] = {}
    refused = {}
    ways = CONFIGURATIONS | (ROTATED if chosen.optimizers else {})
    limited = {name: [*options_of(limits), "--all-workers"] for name, limits in ways.items()}
    for name, options in (limited if chosen.memory else limited | CHOICES).items():
        case = Case(network, name)
        if not re.search(chosen.only, str(case)):
            continue
        file = folder / f"{network} {name}.toml"
        workers = 1 if name == "one worker" else 2
        asked = ["plan", *words, *options, "--workers", workers, "--cluster", folder / "cluster.toml", "--json"]
        status, told, said = in_this_process(*asked, "--out", file)
        if status:
            refused[str(case)] = said.strip()
            continue
        facts = json.loads(told)
        predicted = facts.get("measured_seconds", facts["predicted_seconds"])
        layers = facts["predicted_seconds"] / math.prod(facts["corrections"].values())
        rates = layers
        if name not in CHOICES and not chosen.memory:
            _, told, _ = in_this_process(*asked, "--layers", "counted", "--out", folder / "counted.toml")
            rates = json.loads(told)["predicted_seconds"]
        axes = "pipeline {pipeline}, data {data}, tensor {tensor}, space {space}, {sharding}".format(**facts["chosen"])
        way = f"{facts['chosen']['method']}, {axes}"
        spread = facts["predicted"].get("spread")
        rows[case] = Row(file, predicted, layers, rates, max(facts["predicted_bytes"]), facts["doubts"], way, spread)
        say(f"planned: {case}")
    return rows, refused


def train(case: Case, row: Row, words: Sequence[str], folder: Path) -> None:
    """One run of a plan; its seconds of a step, and its memory."""
    steps = max(STEPS[0], min(STEPS[1], round(LASTING / row.predicted)))
    trusted = [word for pair in zip(words[::2], words[1::2], strict=True) if ":" in pair[1] for word in pair]
    out = folder / "run"
    status, told, said = stretto(
        "train", "--plan", row.file, *trusted, "--steps", steps, "--evaluations", 1, "--out", out, "--json"
    )
    if status:
        raise SystemExit(f"{case}: {said}")
    facts = json.loads(told)
    row.seconds.append(facts["seconds_per_step"])
    subprocess.run(["rm", "-r", out], check=True)


def memory(row: Row) -> float:
    """The most bytes that the tensors of the fullest worker took, in processes of their own, which nobody times."""
    with row.file.open("rb") as file:
        training = tomllib.load(file)["train"]
    peaks = list[float]()
    start(remember, [training], LaunchSettings(workers=int(training.get("workers", 1))), peaks.append)
    return max(peaks)


def remember(training: Mapping[str, Any], pipe: Connection) -> None:
    """One of these processes: a few steps; sends what its tensors took meanwhile, without data."""
    settings = resolve(settings_of(training))
    torch.set_num_threads(1)
    dataset(settings)
    with peak_memory() as peak:
        prepared = prepare(settings)
        batches = training_batches(prepared)
        with prepared.trainer.backend.abort_all_on_error():
            peak.part_ends()
            for step in range(2 * int(training["stages"]) + 20):
                prepared.trainer.step(*next(batches))
                if step >= 2 * int(training["stages"]) + 2:
                    peak.part_ends()
    pipe.send(float(peak.bytes))


def evaluated(rows: Mapping[Case, Row]) -> dict[str, Any]:
    """Predicted beside measured seconds, and the figures that have bars."""
    known: dict[str, dict[str, Any]] = {}
    for case, row in rows.items():
        measured = statistics.median(row.seconds)
        known[str(case)] = {
            "way": row.way,
            "spread": row.spread,
            "predicted ms": 1e3 * row.predicted,
            "measured ms": 1e3 * measured,
            "error": row.predicted / measured - 1,
            "error without whole steps": row.layers / measured - 1,
            "error of rates": row.rates / measured - 1,
            "noise": another(row.seconds),
            "runs ms": [1e3 * seconds for seconds in row.seconds],
        }
    limited = [each for case, each in zip(rows, known.values(), strict=True) if case.configuration not in CHOICES]
    errors = [abs(each["error"]) for each in limited]
    networks = [[(case.configuration, row) for case, row in rows.items() if case.network == network]
                for network in dict.fromkeys(case.network for case in rows)]  # fmt: skip
    return {"cases": known, "summary": {
        "mean of rates": statistics.fmean(abs(each["error of rates"]) for each in limited),
        "mean without whole steps": statistics.fmean(abs(each["error without whole steps"]) for each in limited),
        "mean": statistics.fmean(errors), "median": statistics.median(errors), "worst": max(errors),
        "rank": statistics.fmean(map(rank, networks)),
        "regret": max(regret(each, "chosen") for each in networks),
        "regret of trials": max(regret(each, "tried") for each in networks),
        "noise": statistics.fmean(each["noise"] for each in limited),
        "noise, worst": max(each["noise"] for each in limited),
    }}  # fmt: skip


def remembered(rows: Mapping[Case, Row]) -> dict[str, Any]:
    """Predicted beside measured bytes of the fullest worker."""
    known: dict[str, dict[str, Any]] = {
        str(case): {"way": row.way, "predicted MB": row.bytes / 1e6, "measured MB": row.peak / 1e6,
                    "error": row.bytes / row.peak - 1}
        for case, row in rows.items() if row.peak is not None
    }  # fmt: skip
    errors = [abs(each["error"]) for each in known.values()]
    return {"cases": known, "summary": {"memory, mean": statistics.fmean(errors), "memory": max(errors)}}


def another(seconds: Sequence[float]) -> float:
    """How far a run lies from the median of the others, mean: the error of a prediction that is another run."""
    if len(seconds) < 2:
        return 0.0
    others = [statistics.median([*seconds[:index], *seconds[index + 1 :]]) for index in range(len(seconds))]
    return statistics.fmean(abs(other / own - 1) for own, other in zip(seconds, others, strict=True))


def rank(rows: Sequence[tuple[str, Row]]) -> float:
    """Spearman's rho of predicted and measured seconds."""
    limited = [row for name, row in rows if name not in CHOICES]
    if len(limited) < 3:
        return 1.0
    columns = [[row.predicted for row in limited], [statistics.median(row.seconds) for row in limited]]
    return statistics.correlation(*([sorted(each).index(value) for value in each] for each in columns))


def regret(rows: Sequence[tuple[str, Row]], choice: str) -> float:
    """How much slower than the fastest the plan is that was chosen without limits."""
    chosen = [row for name, row in rows if name == choice]
    fastest = min(statistics.median(row.seconds) for _, row in rows)
    return max((statistics.median(row.seconds) / fastest - 1 for row in chosen), default=0.0)


def say(text: str) -> None:
    """Show progress."""
    print(f"{text:<70}", end="\r", file=sys.stderr, flush=True)


def tell(result: Mapping[str, Any]) -> None:
    """Print the table and the summary."""
    for name, row in result["cases"].items():
        unit = "ms" if "measured ms" in row else "MB"
        noise = f"{row['noise']:6.1%}" if "noise" in row else ""
        chosen = row["way"] if name.split(", ")[-1] in CHOICES else ""
        predicted, measured = row[f"predicted {unit}"], row[f"measured {unit}"]
        print(f"{name:<34} {predicted:9.2f} {measured:9.2f} {row['error']:+7.1%} {noise} {chosen}")
    for case, reason in result["refused"].items():
        print(f"{case:<30} no plan: {reason}")
    for key, value in result["summary"].items():
        bar = BARS.get(key)
        met = "" if bar is None else f"bar {bar:g}: {'met' if (value >= bar) == (key == 'rank') else 'MISSED'}"
        print(f"{key:<24} {value:.3f}  {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--unseen-2", action="store_true")
    parser.add_argument("--optimizers", action="store_true", help="networks under other optimizers, and rotated ones")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 20), metavar="1..19")
    parser.add_argument("--only", default="", help="a pattern that cases must match: network, configuration")
    parser.add_argument("--cluster", type=Path, help="a calibration of this machine; made anew unless it is given")
    parser.add_argument(
        "--memory", action="store_true", help="compare bytes instead of seconds, under torch's profiler"
    )
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    fork_server.prepare()
    sets = {"-held-out": HELD_OUT, "-unseen": UNSEEN, "-unseen-2": UNSEEN_2, "-optimizers": OPTIMIZERS}
    asked = {name: getattr(chosen, name[1:].replace("-", "_")) for name in sets}
    kind = next((kind for kind, wanted in asked.items() if wanted), "")
    networks = sets.get(kind, LOOKED_AT)
    name = f"road{kind}{'-memory' if chosen.memory else ''}.json"
    out = chosen.out or HERE / name
    load, begin = os.getloadavg()[0], time.perf_counter()
    rows: dict[Case, Row] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if chosen.cluster is None:
            status, _, said = stretto("calibrate", "--out", folder / "cluster.toml", "--quiet")
            if status:
                raise SystemExit(said)
        else:
            (folder / "cluster.toml").write_bytes(chosen.cluster.read_bytes())
        for turn in range(chosen.rounds):
            for network, words in networks.items():
                if turn == 0:  # a network is trained when it has been planned for
                    planned, none = promised(network, words, chosen, folder)
                    rows, refused = rows | planned, refused | none
                for case in [case for case in rows if case.network == network]:
                    say(f"round {turn + 1} of {chosen.rounds}: {case}")
                    if chosen.memory:
                        rows[case].peak = memory(rows[case])
                    else:
                        train(case, rows[case], words, folder)
                if not rows:  # networks that --only leaves out
                    continue
                facts = {"load when it began": load, "seconds": time.perf_counter() - begin, "rounds": turn + 1}
                result = {"machine": facts, **(remembered if chosen.memory else evaluated)(rows), "refused": refused}
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tell(result)


if __name__ == "__main__":
    main()
