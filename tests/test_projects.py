"""The projects in examples/ train on small stand-ins for their data, and say truly how long they are."""

import ast
import gzip
import io
import json
import re
import shlex
import shutil
import sys
import tokenize
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stretto.cli import main
from stretto.options.import_object import import_object

pytestmark = pytest.mark.docs

EXAMPLES = Path(__file__).parent.parent / "examples"
PROJECTS = ("fashion", "llama", "series")
FEW = ["--steps", "3", "--batch-size", "8", "--evaluations", "2", "--json", "--out", "run"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of all projects, with data beside them."""
    for project in PROJECTS:
        shutil.copytree(EXAMPLES / project, tmp_path / project, ignore=shutil.ignore_patterns("tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def idx(path, dims, values):
    header = np.array([0x800 + len(dims), *dims], dtype=">u4").tobytes()
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def write_clothes(folder, examples=100):
    """A hundred images for training, or more, and ten for the test, as many of each class."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, number in (("train", examples), ("t10k", 10)):
        idx(folder / f"{name}-images-idx3-ubyte.gz", (number, 28, 28), draw.integers(0, 256, (number, 28, 28)))
        idx(folder / f"{name}-labels-idx1-ubyte.gz", (number,), np.arange(number) % 10)
    return folder


def write_text(folder):
    """Lines of distinct words, enough for a thousand byte pairs."""
    folder.mkdir()
    words = [f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in ("nt", "rs", "lm", "st")]
    draw = np.random.default_rng(0)
    for name, number in (("train", 9000), ("validation", 600), ("test", 600)):
        (folder / f"{name}.txt").write_text(" ".join(draw.choice(words, number)))
    return folder


WRITERS = {"fashion": write_clothes, "llama": write_text}


def train(capsys, *words):
    assert main(["train", *words, *FEW]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_fashion(folder, capsys):
    clothes = str(write_clothes(folder / "clothes"))
    result, _ = train(capsys, "--model", "fashion/own.py:build", "--model-options.width", "4", "--data",
                      "fashion-mnist", "--data-options.path", clothes, "--method", "greedy")  # fmt: skip
    assert result["status"] == "finished"
    assert result["steps"] == 3
    network = import_object("fashion/own.py:build")(width=4)
    network.load_state_dict(load_file("run/model.safetensors"))


@pytest.mark.slow
def test_llama(folder, capsys):
    text = str(write_text(folder / "text"))
    words = ["--model", "llama/own.py:build", "--model-options.width", "8", "--model-options.layers", "1",
             "--data", "llama/own.py:data", "--data-options.path", text, "--stages", "2"]  # fmt: skip
    result, err = train(capsys, *words)
    assert result["status"] == "finished"
    assert err == "", "the tokenizer is trained quietly"
    tokenizer = (folder / "llama" / "tokenizer.json").read_bytes()
    again, _ = train(capsys, *words)
    assert again["out"] == result["out"], "the tokenizer is read, so that the data are the same and the run has ended"
    (folder / "llama" / "tokenizer.json").unlink()
    import_object("llama/own.py:tokenizer")(folder / "text" / "train.txt")
    assert (folder / "llama" / "tokenizer.json").read_bytes() == tokenizer, "the same text gives the same tokenizer"
    assert main(["plan", *words[:-2], "--optimizer", "adamw", "--cluster", "8-a100", "--workers", "2", "--quiet"]) == 0
    assert main(["train", "--plan", "plan.toml", *words[:2], *words[6:8], "--dry-run"]) == 0
    assert f'path = "{text}"' in capsys.readouterr().out, "options of functions are in the plan"


def test_series(folder, capsys):
    result, _ = train(capsys, "--model", "series/own.py:build", "--model-options.size", "4",
                      "--data", "series/own.py:data",
                      "--loss", "series/own.py:quantile", "--metric", "mae=series/own.py:mae", "--optimizer", "adamw",
                      "--method", "overlapping(head=sequence)")  # fmt: skip
    network = nn.Sequential(*import_object("series/own.py:build")(size=4))
    network.load_state_dict(load_file("run/model.safetensors"))
    _, _, (x, y) = import_object("series/own.py:data")()
    with torch.no_grad():
        mae = import_object("series/own.py:mae")(network(x), y)
    assert result["test_mae"] == pytest.approx(float(mae), rel=1e-4)


@pytest.mark.parametrize("project", ["fashion", "series", pytest.param("llama", marks=pytest.mark.slow)])
def test_plain_training_goes_on_from_its_checkpoint(folder, project, capsys, monkeypatch):
    """Eight steps, and four with four more behind them: the same test."""
    data = WRITERS[project](folder / "data") if project in WRITERS else None
    own = import_object(f"{project}/own.py:build")
    monkeypatch.setitem(sys.modules, "own", sys.modules[own.__module__])
    text = (folder / project / "plain.py").read_text()
    for before, after in (("6000", "20"), (r"STEPS, BATCH, EVERY = \d+, 32, 50", "STEPS, BATCH, EVERY = 8, 8, 4")):
        text = re.sub(before, after, text)
    tests = []
    for steps in (8, 4, 8):
        if steps == 4:
            Path("plain.pt").unlink()
        found = {"__name__": "plain"}
        exec(compile(text.replace("= 8, 8, 4", f"= {steps}, 8, 4"), "plain.py", "exec"), found)
        found["main"](*([data] if data else []))
        tests.append(capsys.readouterr().out.splitlines()[-1])
    assert tests[0] == tests[2] != tests[1]
    assert tests[0].startswith("test loss")


@pytest.mark.parametrize("project", ["fashion", "series", pytest.param("llama", marks=pytest.mark.slow)])
def test_commands_of_the_readme_are_understood(folder, project, capsys, monkeypatch):
    monkeypatch.chdir(folder / project)
    if project in WRITERS:
        WRITERS[project](folder / "data")
    commands = re.findall(r"^stretto (?:compare|train) .*$", Path("README.md").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("FOLDER", str(folder / "data")))[1:]
        if project == "llama":  # each method is tried, and transformers' models take seconds to trace
            words = ["backprop" if "backprop," in word else word for word in words]
        assert main([*words, "--dry-run"]) == 0, capsys.readouterr().err


def num_lines(path):
    """Lines of code: without blank ones, comments and docstrings."""
    text = path.read_text()
    documented = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = {
        line for node in documented if ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }  # fmt: skip
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in skipped for line in range(t.start[0], t.end[0] + 1)}
    return len(code - docstrings)


@pytest.mark.parametrize("project", PROJECTS)
def test_lines_are_counted_as_the_readme_says(project):
    text = (EXAMPLES / project / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    own, plain = num_lines(EXAMPLES / project / "own.py"), num_lines(EXAMPLES / project / "plain.py")
    assert f"| lines of code | {own} | {own} + {plain} |" in text
