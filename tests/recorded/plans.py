"""Plans and pages whose numbers are recorded: what the planner says of 30 settings, and of every published row.

A published row is one candidate with every choice given, so its JSON is that candidate's price table: seconds by term,
bytes by worker.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "published"
GPT = ("--model", "decoder", "--model-options.depth", "12", "--model-options.width", "1024", "--model-options.heads",
       "16", "--model-options.context", "1024", "--model-options.vocabulary", "51200")  # fmt: skip
IMAGES = ("--model", "resnet50", "--dtype", "float16-autocast", "--memory-format", "channels_last")
ONE_NODE = ("--cluster", "8-a100")
SLOW = ("--cluster", "16-workstations", "--workers", "4")
SETTINGS: tuple[tuple[str, ...], ...] = (
    (*GPT, *ONE_NODE, "--batch-size", "64"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--objective", "memory"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--frontier"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--explain"),
    (*GPT, *ONE_NODE, "--batch-size", "64,128", "--objective", "loss", "--critical-batch", "256"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--methods", "all", "--pipeline", "4", "--all-workers"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--tensor", "2", "--pipeline", "2", "--recompute", "full"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--tensor", "4", "--sequence-parallel", "no", "--recompute", "selective"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--sharding", "fully-shard", "--dtype", "bfloat16-autocast"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--sharding", "shard-optimizer", "--optimizer", "adamw"),
    (*GPT, "--cluster", "8-nodes-of-8-h100", "--batch-size", "256", "--workers", "16", "--pipeline", "4", "--methods",
     "interleaved", "--stages", "4x3"),
    (*GPT, "--cluster", "8-nodes-of-8-h100", "--batch-size", "64", "--workers", "16", "--mtbf-hours", "20000",
     "--checkpoint-seconds", "30", "--restart-seconds", "120"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--methods", "zb-h1", "--pipeline", "4", "--data-parallel", "2"),
    (*GPT, *ONE_NODE, "--batch-size", "64", "--methods", "zb-v,dualpipe-v", "--pipeline", "4"),
    (*GPT, "--cluster", "8-v100", "--batch-size", "32", "--dtype", "float16"),
    (*GPT, "--cluster", "wide-area", "--batch-size", "32", "--methods", "synchronous,asynchronous"),
    ("--model", "encoder", "--model-options.depth", "12", "--model-options.width", "768", "--model-options.context",
     "512", "--model-options.vocabulary", "30522", *ONE_NODE, "--batch-size", "64", "--dtype", "tfloat32"),
    ("--model", "vit", "--model-options.depth", "12", "--model-options.width", "768", *ONE_NODE, "--batch-size", "256"),
    (*IMAGES, *ONE_NODE, "--batch-size", "512"),
    (*IMAGES, *ONE_NODE, "--batch-size", "256", "--space", "2,1", "--workers", "2", "--all-workers"),
    ("--model", "resnet152", "--dtype", "float32", "--cluster", "1-rtx-3090", "--batch-size", "64"),
    ("--model", "gpt3-small", "--cluster", "8-nodes-of-8-h100", "--batch-size", "128", "--workers", "16"),
    ("--model", "mlp", *SLOW, "--batch-size", "64", "--methods", "local"),
    ("--model", "mlp", *SLOW, "--batch-size", "64", "--methods", "all", "--objective", "loss",
     "--critical-batch", "64", "--penalties.pb", "1.3"),
    ("--model", "mlp", "--cluster", "wide-area", "--batch-size", "64", "--methods", "all", "--workers", "4"),
    ("--model", "mlp", *SLOW, "--batch-size", "64", "--objective", "energy"),
    ("--model", "cnn", *SLOW, "--batch-size", "128", "--optimizer", "lamb"),
    ("--model", "transformer", *SLOW, "--batch-size", "32", "--methods", "pipedream-2bw,pb,1f1b", "--begins", "0,2"),
    ("--model", "encoder-decoder", "--data", "number-words", *SLOW, "--batch-size", "32"),
    ("--model", "mlp", "--cluster", "16-workstations", "--batch-size", "64", "--scale", "1,4,16"),
)  # fmt: skip


def published() -> list[tuple[str, ...]]:
    """The words of the command of every published row that is not refused."""
    rows = of_benchmark("rows")
    results = (BENCHMARK / name for name in ("result.json", *(file.replace("toml", "json") for file in rows.FILES[1:])))
    known = [each for result in results for each in json.loads(result.read_text())["rows"]]
    refused = {each["name"] for each in known if each["refusal"] is not None}
    every = (row for file in rows.FILES for row in rows.read_rows(file))
    return [tuple(row.arguments()) for row in every if row.name not in refused]


def predict() -> Any:
    """The benchmark's `stretto plan`, which takes `--program`."""
    return of_benchmark("predict")


def of_benchmark(name: str) -> Any:
    """A module of the benchmark of published rows."""
    sys.path.insert(0, str(BENCHMARK))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARK))
