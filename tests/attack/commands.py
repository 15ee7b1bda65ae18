"""Random command lines and files, in this process: exit code 0, or 2 and one clear message without a traceback."""

import contextlib
import io
import json
import os
import random
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import stretto.cli
from attack.protocol import Outcome

SHARE = 40
METHODS = [
    "1f1b",
    "gpipe",
    "greedy",
    "pb",
    "chunked(chunks=3)",
    "zb-h1",
    "interleaved",
    "backprop",
    "pipemare",
    "nesterov",
]
WRONG = [
    "", " ", "-1", "0", "nan", "inf", "-inf", "1e99", "1.5", "text", "1,2", "a,b", "None", "[]", "{}", "é",
    "\0", "--", "-",
    "/", ".", "..", "../../evil", "missing.toml", "99999999999999999999",
    "true", "(", "1f1b(", "pb(spike=)", "'", "=", "a=1",
    "greedy(head=)", "csv",
    "csv(path=/)", "csv(path=damaged.csv)", "damaged.toml", "damaged.csv",
    "folder", "1" * 300,
]  # fmt: skip

# Of each command: words that make it run, and its options with values that work.
SHOW = {
    "--stages": ["1", "3", "4"], "--workers": ["1", "2"], "--microbatches": ["1", "3", "8"], "--svg": ["a.svg"],
    "--csv": ["a.csv"], "--plan": ["plan.toml"], "--from": ["good.csv"],
}  # fmt: skip
SIMULATE = {
    "--method": METHODS, "--stages": ["2", "4"], "--workers": ["2"], "--microbatches": ["4"], "--forward": ["1", "1,2"],
    "--backward": ["2"], "--latency": ["0.1"], "--trace": ["trace.pb"],
}  # fmt: skip
TRAIN = {
    "--model": ["mlp", "cnn"], "--data": ["digits"], "--method": METHODS, "--stages": ["2", "4"], "--steps": ["2"],
    "--batch-size": ["16"], "--lr": ["0.1"], "--seed": ["1"], "--workers": ["1"], "--out": ["run"], "--trace": ["t.pb"],
    "--optimizer": ["sgd", "adam"], "--data-parallel": ["1", "2"], "--sync": ["all-reduce", "local-sgd(every=2)"],
    "--model-options.width": ["8"], "--precision": ["bf16"], "--checkpoint-every": ["2"], "--restarts": ["1"],
    "--clip": ["1"], "--measure": ["cosine"], "--eval-every": ["2"], "--accounting": ["paper"], "--timeout": ["60"],
}  # fmt: skip
COMPARE = {
    "--model": ["mlp"], "--data": ["digits"], "--methods": ["backprop", "greedy,pb"], "--steps": ["2"],
    "--seeds": ["1"],
    "--lr": ["0.1,0.2"], "--batch-size": ["16"], "--out": ["study"], "--size": ["small"], "--storage": ["sqlite:///s.db"],
    "--examples": ["32"], "--lr-scaling": ["sqrt"], "--reference-batch": ["16"], "--part": ["a"],
}  # fmt: skip
PLAN = {
    "--workers": ["2"], "--cluster": ["8-a100", "damaged.toml"], "--model": ["mlp"], "--data": ["digits"],
    "--out": ["p.toml"],
    "--batch-size": ["64"], "--objective": ["time"],
}  # fmt: skip
COMMANDS: list[tuple[list[str], dict[str, list[str]]]] = [
    (["show", "1f1b"], SHOW),
    (["show", "--from", "good.csv"], SHOW),
    (["simulate"], SIMULATE),
    (["train", "--dry-run"], TRAIN),
    (["train", "good.toml", "--dry-run"], TRAIN),
    (["compare", "--dry-run"], COMPARE),
    (["compare", "good.toml", "--dry-run"], COMPARE),
    (["plan", "--model", "mlp", "--workers", "2", "--cluster", "nowhere"], PLAN),
    (["report", "folder"], {"--out": ["r"]}),
    (["inspect", "folder"], {"--json": [""]}),
    (["report"], {}),
    ([], {"--version": [""], "--help": [""]}),
]
GOOD = {
    "good.csv": "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
    "good.toml": 'model = "mlp"\ndata = "digits"\nsteps = 3\nbatch_size = 16\n',
    "plan.toml": '[plan]\nmethod = "1f1b"\nstages = 2\npipeline = 2\n',
}
FOLDER = {"run.json": {"format": 1}, "study.json": {}, "events.jsonl": {}}


def attack(seed: int) -> Outcome:
    """One command line in a folder of its own, with wrong values, unknown words, or a damaged file."""
    draw = random.Random(seed)
    here, width = Path.cwd(), os.environ.get("COLUMNS")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["COLUMNS"] = "200"
        generator = torch.get_rng_state()
        try:
            write_files(draw)
            return ran(line(draw))
        finally:
            torch.set_rng_state(generator)
            os.chdir(here)
            if width is None:
                del os.environ["COLUMNS"]
            else:
                os.environ["COLUMNS"] = width


def line(draw: random.Random) -> list[str]:
    """A command with some of its options, of which one or two are wrong."""
    words, known = draw.choice(COMMANDS)
    made = list(words)
    for name in draw.sample(list(known), min(len(known), draw.randint(0, 3))):
        made += [name, draw.choice(known[name] if draw.random() < 0.5 else WRONG)]
    if draw.random() < 0.15:
        made.insert(
            draw.randint(0, len(made)), draw.choice([*WRONG, "--unknown", "--stage", "-x", "damaged.toml", "train"])
        )
    if made and draw.random() < 0.1:
        made[draw.randrange(len(made))] = draw.choice(WRONG)
    return (
        made if "plan" in made or "--dry-run" in made or not {"train", "compare"} & set(made) else [*made, "--dry-run"]
    )


DAMAGES: list[Callable[[random.Random, str], str]] = [
    lambda draw, text: text[: draw.randint(0, len(text))],
    lambda draw, text: text.replace(draw.choice(text), draw.choice(['"', "\0", "[", "=", "é", "9", ""])),
    lambda draw, text: (
        text + draw.choice(["x = 1\n", "[plan]\n", "steps = 'text'\n", "[[a]]\nb = 1\n", "0X0\n", ",,\n"])
    ),
    lambda draw, text: text.replace("3", draw.choice(["-3", "nan", "true", "[3]", "'3'", "1e99"])),
    lambda draw, text: "\n".join(draw.sample(text.splitlines(), len(text.splitlines()))),
    lambda draw, text: draw.choice(["", "\n", "{}", "[]", "0", "null", "\ufeff" + text]),
]


def write_files(draw: random.Random) -> None:
    """Good files, damaged ones, and a folder that is no run."""
    for name, text in GOOD.items():
        damaged = draw.random() < 0.3
        Path(name).write_text(draw.choice(DAMAGES)(draw, text) if damaged else text)
    for suffix in ("toml", "csv"):
        Path(f"damaged.{suffix}").write_text(draw.choice(DAMAGES)(draw, GOOD[f"good.{suffix}"]))
    Path("folder").mkdir()
    for name, content in FOLDER.items():
        if draw.random() < 0.6:
            text = json.dumps(content)
            (Path("folder") / name).write_text(draw.choice(DAMAGES)(draw, text) if draw.random() < 0.7 else text)


def ran(words: list[str]) -> Outcome:
    """Run a command line here, and judge its exit code and what it wrote."""
    tried = " ".join(["stretto", *map(repr, words)])
    told, complained = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(complained):
            code = stretto.cli.main(words)
    except Exception as error:  # noqa: BLE001 (what the attack looks for)
        return Outcome(tried, f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}")
    said = complained.getvalue()
    if "Traceback" in said:
        return Outcome(tried, f"a traceback:\n{said}")
    if code == 2:
        one = said.count("stretto: ") >= 1 and len(said.strip()) > len("stretto: ")
        return Outcome(tried, passed="refused") if one else Outcome(tried, f"no message: {said!r}")
    if code != 0:
        return Outcome(tried, f"exit code {code}:\n{said}")
    return Outcome(tried, passed="succeeded")
