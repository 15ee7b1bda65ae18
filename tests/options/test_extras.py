"""What a plain installation lacks is asked for by the name of an extra, before anything is computed."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stretto.options.extras import EXTRAS

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
WITHOUT = """
import importlib.util, sys
hidden = {*sys.argv[1].split()}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in hidden else find(name, *rest)


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
"""
PLAIN = "altair vl_convert perfetto google sklearn scipy pandas pytest optuna tokenizers datasets sacrebleu PIL numba"


def without(code, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT + code, PLAIN, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


CLI = "from stretto.cli import main; sys.exit(main(sys.argv[2:]))"


@pytest.mark.slow
def test_a_trainer_needs_torch_and_little_else():
    done = without(
        "import torch, stretto\n"
        "from stretto.data import load\n"
        "x, y = load('digits').train.first(64)\n"
        "layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]\n"
        "stages = stretto.split(torch.nn.Sequential(*layers), 2, example=x)\n"
        "loss = torch.nn.functional.cross_entropy\n"
        "trainer = stretto.Trainer(stages, loss, torch.optim.Adam, 'greedy', example=x)\n"
        "trainer.step(x, y)\n"
        "trainer.flush()\n"
        "print(trainer.evaluate([(x, y)]))"
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


@pytest.mark.slow
def test_the_command_line_trains_without_extras(tmp_path):
    words = ["train", "--steps", "2", "--stages", "2", "--quiet", "--out", str(tmp_path / "run")]
    done = without(CLI, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "run.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "compare --steps 2",
            'stretto compare writes a page of charts, which needs altair and vl_convert, .*"stretto[rep',
        ),
        ("report nothere", "stretto report writes a page of charts, which needs altair"),
        ("inspect nothere", "stretto inspect writes a page"),
        ("plan --cluster 8-a100 --model transformer --scale 8", "--scale needs altair"),
        (
            "train --trace t.pftrace",
            '--trace needs perfetto, which a plain installation lacks: pip install "stretto[tr',
        ),
        ("simulate --overlay run", "--overlay needs perfetto"),
    ],
)
def test_what_needs_an_extra_says_which_and_computes_nothing(words, message, tmp_path):
    done = without(f"import os; os.chdir({str(tmp_path)!r}); " + CLI, *words.split())
    assert done.returncode == 2, done.stderr
    begin, _, end = message.partition(".*")
    assert begin in done.stderr
    assert end in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_calls_it_missing():
    done = without("from stretto.doctor.environment import report, try_check; print(try_check('report', report).state)")
    assert done.stdout == "missing\n", done.stderr


def test_extras_are_those_of_the_project():
    optional = PROJECT["optional-dependencies"]
    assert EXTRAS.keys() <= optional.keys()
    named = [requirement for extra in EXTRAS for requirement in optional[extra]]
    assert {*named} <= {*optional["dev"]}, "make test needs them all"
