"""What `stretto plan` promises beside what `stretto train --plan` takes, as a user meets both: see README.md here.

OMP_NUM_THREADS=1 python benchmarks/prediction/road.py [--held-out] [--rounds 3] [--only TEXT] [--out road.json]
"""

import argparse
import contextlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stretto.cli.program import main as command_line

HERE = Path(__file__).parent
OWN = HERE / "own.py"
BARS = {"mean": 0.06, "worst": 0.2, "memory": 0.05, "regret": 0.05, "rank": 0.95}
LASTING, STEPS = 1.2, (16, 300)  # seconds of a run's steps, about; the fewest and the most


def own(model: str, data: str, batch: int) -> list[str]:
    """A user's module and data."""
    return [
        "--model",
        f"{OWN}:{model}",
        "--data",
        f"{OWN}:{data}",
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


class Case(NamedTuple):
    """A network, and one way to train it."""

    network: str
    configuration: str

    def __str__(self) -> str:
        return f"{self.network}, {self.configuration}"


@dataclass
class Row:
    """What was promised of a case, and what runs took; bytes of the fullest worker."""

    file: Path
    predicted: float
    bytes: float
    doubts: Sequence[str]
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)


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


def promised(networks: Mapping[str, Sequence[str]], only: str, folder: Path) -> tuple[dict[Case, Row], dict[str, str]]:
    """A plan for each case, and why others have none."""
    rows: dict[Case, Row] = {}
    refused = {}
    for network, words in networks.items():
        for configuration, limits in CONFIGURATIONS.items():
            case = Case(network, configuration)
            if not re.search(only, str(case)):
                continue
            workers = 1 if configuration == "one worker" else 2
            file = folder / f"{len(rows)}.toml"
            status, told, said = in_this_process(
                "plan", *words, *options_of(limits), "--workers", workers, "--all-workers", "--cluster",
                folder / "cluster.toml", "--out", file, "--json",
            )  # fmt: skip
            if status:
                refused[str(case)] = said.strip()
                continue
            facts = json.loads(told)
            rows[case] = Row(file, facts["predicted_seconds"], max(facts["predicted_bytes"]), facts["doubts"])
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


def evaluated(rows: Mapping[Case, Row]) -> dict[str, Any]:
    """Predicted beside measured, and the figures that have bars."""
    known = {}
    for case, row in rows.items():
        measured = statistics.median(row.seconds)
        known[str(case)] = {
            "predicted ms": 1e3 * row.predicted,
            "measured ms": 1e3 * measured,
            "error": row.predicted / measured - 1,
            "noise": (max(row.seconds) - min(row.seconds)) / measured,
        }
    errors = [abs(each["error"]) for each in known.values()]
    networks = list(dict.fromkeys(case.network for case in rows))
    return {"cases": known, "summary": {
        "mean": statistics.fmean(errors), "worst": max(errors),
        "rank": statistics.fmean(rank([row for case, row in rows.items() if case.network == network])
                                 for network in networks),
        "regret": max(regret([row for case, row in rows.items() if case.network == network]) for network in networks),
        "noise": statistics.fmean(each["noise"] for each in known.values()),
    }}  # fmt: skip


def rank(rows: Sequence[Row]) -> float:
    """Spearman's rho of predicted and measured seconds."""
    if len(rows) < 3:
        return 1.0
    columns = [[row.predicted for row in rows], [statistics.median(row.seconds) for row in rows]]
    return statistics.correlation(*([sorted(each).index(value) for value in each] for each in columns))


def regret(rows: Sequence[Row]) -> float:
    """How much slower than the fastest the one is that was predicted to be."""
    chosen = min(rows, key=lambda row: row.predicted)
    return statistics.median(chosen.seconds) / min(statistics.median(row.seconds) for row in rows) - 1


def say(text: str) -> None:
    """Show progress."""
    print(f"{text:<70}", end="\r", file=sys.stderr, flush=True)


def tell(result: Mapping[str, Any]) -> None:
    """Print the table and the summary."""
    for name, row in result["cases"].items():
        print(
            f"{name:<30} {row['predicted ms']:9.2f} {row['measured ms']:9.2f} {row['error']:+7.1%} {row['noise']:6.1%}"
        )
    for case, reason in result["refused"].items():
        print(f"{case:<30} no plan: {reason}")
    for key, value in result["summary"].items():
        bar = BARS.get(key)
        met = "" if bar is None else f"bar {bar:g}: {'met' if (value >= bar) == (key == 'rank') else 'MISSED'}"
        print(f"{key:<8} {value:.3f}  {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, choices=range(1, 20), metavar="1..19")
    parser.add_argument("--only", default="", help="a pattern that cases must match: network, configuration")
    parser.add_argument("--cluster", type=Path, help="a calibration of this machine; made anew unless it is given")
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    networks = HELD_OUT if chosen.held_out else LOOKED_AT
    out = chosen.out or HERE / ("road-held-out.json" if chosen.held_out else "road.json")
    load, begin = os.getloadavg()[0], time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if chosen.cluster is None:
            status, _, said = stretto("calibrate", "--out", folder / "cluster.toml", "--quiet")
            if status:
                raise SystemExit(said)
        else:
            (folder / "cluster.toml").write_bytes(chosen.cluster.read_bytes())
        rows, refused = promised(networks, chosen.only, folder)
        for turn in range(chosen.rounds):
            cases = list(rows)
            for case in cases[3 * turn % len(cases) :] + cases[: 3 * turn % len(cases)]:
                say(f"round {turn + 1} of {chosen.rounds}: {case}")
                train(case, rows[case], networks[case.network], folder)
            facts = {"load when it began": load, "seconds": time.perf_counter() - begin, "rounds": turn + 1}
            result = {"machine": facts, **evaluated(rows), "refused": refused}
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tell(result)


if __name__ == "__main__":
    main()
