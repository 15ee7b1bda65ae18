"""What a plain installation lacks is asked for by the name of an extra, before anything is computed."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from runtime.nursery import Forked
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
IN_TURN = """
import contextlib, io, json, os
from pathlib import Path

from stretto.cli import main

told = {}
for number, words in enumerate(json.loads(sys.argv[2])):
    folder = Path(str(number))
    folder.mkdir()
    with contextlib.chdir(folder), contextlib.redirect_stderr(io.StringIO()) as err:
        told[words] = main(words.split()), err.getvalue(), os.listdir()
print(json.dumps(told))
"""


TRAINED = """
import torch, stretto
from stretto.data import load

x, y = load('digits').train.first(64)
layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)]
stages = stretto.split(torch.nn.Sequential(*layers), 2, example=x)
loss = torch.nn.functional.cross_entropy
trainer = stretto.Trainer(stages, loss, torch.optim.Adam, 'greedy', example=x)
trainer.step(x, y)
trainer.flush()
print(trainer.evaluate([(x, y)]))
"""


@pytest.mark.slow
def test_a_trainer_needs_torch_and_little_else():
    done = without(TRAINED)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_a_training_step_imports_no_extra():
    """In a fork of a process that has imported torch and Stretto already, from which extras are taken away."""
    taken = "for name in [name for name in sys.modules if name.partition('.')[0] in hidden]: del sys.modules[name]\n"
    process = Forked([sys.executable, "-c", WITHOUT + taken + TRAINED, PLAIN], {**os.environ})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "accuracy" in out


@pytest.mark.slow
def test_the_command_line_trains_without_extras(tmp_path):
    words = ["train", "--steps", "2", "--stages", "2", "--quiet", "--out", str(tmp_path / "run")]
    done = without(CLI, *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "run.json").is_file()


NEEDS = {
    "report nothere": 'stretto report writes a page of charts, which needs altair and vl_convert, .*"stretto[rep',
    "inspect nothere": "stretto inspect writes a page",
    "plan --cluster 8-a100 --model transformer --scale 8": "--scale needs altair",
    "train --trace t.pftrace": '--trace needs perfetto, which a plain installation lacks: pip install "stretto[tr',
    "simulate --overlay run": "--overlay needs perfetto",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Status, stderr and what is left in its folder of each of these commands, one after the other in one process."""
    folder = tmp_path_factory.mktemp("without")
    done = without(f"import os; os.chdir({str(folder)!r})\n" + IN_TURN, json.dumps([*NEEDS]))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("words", "message"), NEEDS.items())
def test_what_needs_an_extra_says_which_and_computes_nothing(words, message, told):
    status, err, there = told[words]
    assert status == 2, err
    begin, _, end = message.partition(".*")
    assert begin in err
    assert end in err
    assert there == []


def test_compare_prints_its_table_without_charts(tmp_path):
    words = (
        "compare --model-options.width 4 --model-options.depth 2 --steps 2 --methods greedy --lr 0.1 --batch-size 32"
    )
    done = without(CLI, *words.split(), "--seeds", "1", "--jobs", "1", "--evaluations", "1", "--out", f"{tmp_path}/s")
    assert done.returncode == 0, done.stderr
    assert "sgd, lr 0.1; batch 32; 2 steps, 1 seed; 1 run, less than a minute\n" in done.stderr
    assert " greedy " in done.stdout
    assert 'no report.html, which needs altair and vl_convert: pip install "stretto[report]", then the' in done.stderr
    assert not (tmp_path / "s" / "report.html").exists()


def test_the_doctor_calls_it_missing():
    done = without("from stretto.doctor.environment import report, try_check; print(try_check('report', report).state)")
    assert done.stdout == "missing\n", done.stderr


def test_extras_are_those_of_the_project():
    optional = PROJECT["optional-dependencies"]
    assert EXTRAS.keys() <= optional.keys()
    named = [requirement for extra in EXTRAS for requirement in optional[extra]]
    assert {*named} <= {*optional["dev"]}, "make test needs them all"
