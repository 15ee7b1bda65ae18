"""stretto.compare and stretto.train: studies and runs from a script, with objects instead of names."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import stretto
from runtime.nursery import Forked
from stretto import UsageError
from stretto.runtime.process_memory import CLEAR
from stretto.study.comparison import RUN_KEYS
from stretto.study.python_calls import digest_of_layers

FEW = {"steps": 4, "batch_size": 8, "evaluations": 2, "jobs": 1, "quiet": True, "seeds": 1}


def build():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def data():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True)
    return (x[:24], y[:24]), (x[24:32], y[24:32]), (x[32:], y[32:])


def mae(output, target):
    return (output - target).abs().mean()


def sgd(params, lr):
    return torch.optim.SGD(params, lr=lr)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, plain_pages):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(**changed):
    given = {"methods": ("backprop", "greedy"), "loss": mse_loss, "optimizer": sgd, "lr": (0.01, 0.05), "stages": 2,
             "metrics": {"mae": mae}, "out": "study", **FEW}  # fmt: skip
    return stretto.compare(changed.pop("model", build), changed.pop("data", data), **given | changed)


def test_a_study_answers():
    study = compared()
    assert [(run["method"], run["options"]["lr"]) for run in study.runs] == [
        ("backprop", 0.01), ("greedy", 0.01), ("backprop", 0.05), ("greedy", 0.05),
    ]  # fmt: skip
    assert all(run.keys() >= {*RUN_KEYS, "mae", "test_mae"} for run in study.runs)
    best = study.best()
    assert best["validation_loss"] == min(run["validation_loss"] for run in study.runs)
    assert study.best("mae")["mae"] == min(run["mae"] for run in study.runs)
    reached = study.frontier("validation_loss", best["validation_loss"] * 1.0001)
    assert best["id"] in [run["id"] for run in reached]
    assert study.frontier("mae", 0.0) == []
    assert study.report() == Path("study/report.html")
    assert study.report().is_file()
    assert "greedy" in study.table()
    assert "<pre>" in study._repr_html_()
    first, *others = study.outcome.records
    mixed = replace(study, outcome=replace(study.outcome, records=(replace(first, threads=3), *others)))
    for told in (repr(mixed), mixed._repr_html_()):
        assert "Do not compare their seconds." in told
    with pytest.raises(UsageError, match="did you mean 'mae'"):
        study.best("mea")


@pytest.mark.parametrize(
    "changed",
    [
        {"model": build()},
        pytest.param({"model": list(build())}, marks=pytest.mark.slow),
        pytest.param({"data": data()}, marks=pytest.mark.slow),
        pytest.param({"data": tuple(TensorDataset(*pair) for pair in data())}, marks=pytest.mark.slow),
        pytest.param(
            {"data": tuple(DataLoader(TensorDataset(*pair), batch_size=8) for pair in data())}, marks=pytest.mark.slow
        ),
        pytest.param({"loss": "mse_loss"}, marks=pytest.mark.slow),
        pytest.param({"optimizer": torch.optim.SGD, "lr": 0.01}, marks=pytest.mark.slow),
    ],
    ids=["module", "layers", "pairs", "datasets", "loaders", "name", "class"],
)
def test_functions_or_what_they_return(changed):
    given = {"methods": "backprop", "lr": 0.01, **changed}
    (run,) = compared(**given).runs
    assert 0 < run["mae"] < 10
    other = compared(**given, out="again").runs[0]
    assert other["test_loss"] == run["test_loss"], "nothing is trained twice in place"


def test_a_module_of_bfloat16_has_a_digest():
    made, other = build().bfloat16(), build().bfloat16()
    assert len({digest_of_layers(made), digest_of_layers(list(made)), digest_of_layers(other)}) == 3
    assert digest_of_layers(made) == digest_of_layers(copy.deepcopy(made))


@pytest.mark.slow
def test_the_order_of_jobs_changes_nothing():
    alone = compared(out="alone")
    at_once = compared(out="at-once", jobs=2)
    assert [run["test_mae"] for run in alone.runs] == [run["test_mae"] for run in at_once.runs]


def test_the_same_call_goes_on_and_another_one_does_not(monkeypatch):
    given = {"methods": "backprop", "lr": 0.01}
    first = compared(data=data(), **given).runs
    written = [path.stat().st_mtime_ns for path in Path("study/runs").glob("*/run.json")]
    assert compared(data=data(), **given).runs == first
    assert [path.stat().st_mtime_ns for path in Path("study/runs").glob("*/run.json")] == written
    with pytest.raises(UsageError, match="from before the examples changed: choose"):
        compared(data=tuple((x * 2, y) for x, y in data()), **given)
    with pytest.raises(UsageError, match=r"from before the model that was given \(.*\) changed"):
        compared(model=build(), data=data(), **given)


@pytest.mark.skipif(not CLEAR.exists(), reason="only Linux can forget a process's peak")
def test_what_a_script_held_before_is_not_in_the_memory_of_a_run():
    given = {"loss": mse_loss, "lr": 0.05, "stages": 2, "steps": 4, "batch_size": 8, "quiet": True}
    (before,) = stretto.train(build, data, **given, out="before")["peak_memory"]
    torch.ones(2**24, dtype=torch.float64).sum()
    (after,) = stretto.train(build, data, **given, out="after")["peak_memory"]
    assert after < before + 2**26


def test_one_run_alone_and_on_processes():
    given = {"method": "1f1b", "loss": mse_loss, "optimizer": sgd, "lr": 0.05, "stages": 2, "metrics": {"mae": mae},
             "steps": 4, "batch_size": 8, "evaluations": 2, "quiet": True}  # fmt: skip
    alone, two = (stretto.train(build, data, **given, out=f"run{n}", workers=n) for n in (None, 2))
    assert alone["test_mae"] == two["test_mae"]
    assert alone.weights().keys() == build().state_dict().keys()
    build().load_state_dict(two.weights())
    assert f"test_mae         {two['test_mae']:.3g}\n" in repr(two), "three digits, in a column as wide as its names"
    assert stretto.train(build, data, **given, out="run2", workers=2)["test_mae"] == two["test_mae"], "it is read"


def test_one_call_begins_goes_on_and_reads(folder, capsys):
    """Interrupted in an evaluation after its first checkpoint, and called again as it was."""

    def interrupting(output, target):
        if any(folder.glob(".run.checkpoints/step-*")) and not (folder / "hit").exists():
            (folder / "hit").touch()
            raise KeyboardInterrupt
        return mae(output, target)

    def call(out="run"):
        given = {"method": "1f1b", "loss": mse_loss, "optimizer": sgd, "lr": 0.01, "stages": 2, "steps": 8}
        options = {"batch_size": 8, "evaluations": 4, "checkpoint_every": 2, "metrics": {"mae": interrupting}}
        return stretto.train(build, data, **given, **options, out=out, resume="auto")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert "run: begins, for .run.checkpoints holds no checkpoint\n" in capsys.readouterr().err
    run = call()
    assert "run: goes on from the checkpoint of step 4\n" in capsys.readouterr().err
    assert call()["test_mae"] == run["test_mae"]
    assert "run: this run is finished already\n" in capsys.readouterr().err
    whole = call("whole")
    assert all(torch.equal(run.weights()[key], value) for key, value in whole.weights().items())
    with pytest.raises(UsageError, match="resume='again': give True, False or 'auto'"):
        stretto.train(build, data, resume="again")


def test_seeds_without_an_effect_on_weights_are_said(capsys):
    compared(seeds=2, model=build(), methods="backprop", lr=0.01)
    assert "gives the same initial weights under every seed" in capsys.readouterr().err
    compared(seeds=2, methods="backprop", lr=0.01, out="other")
    assert "same initial weights" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}, "takes no lr"),
        ({"wieght_decay": 0.1}, "unknown argument 'wieght_decay': did you mean 'weight_decay'"),
        ({"model": 3}, "model=3: give a function, its result, or a name"),
        ({"data": torch.ones(3)}, "data="),
        ({"data": (torch.ones(3, 3), torch.ones(3, 1))}, "given:data: train is Tensor"),
        ({"metrics": {"mae": 3}}, "mae=3: give a function"),
        ({"loss": lambda output, target: (output - target) ** 2}, "the loss returned a tensor"),
        ({"methods": ("backprop", "pb-lwp"), "optimizer": "adam"}, "SGD"),
        ({"stages": 99}, "99"),
        ({"jobs": 0}, "jobs=0: choose a whole number of at least 1"),
        ({"jobs": 2, "workers": 2}, "jobs=2, workers=2: runs on several processes go one after the other"),
        ({"metrics": [mse_loss]}, "metrics=.*: give a dict of functions by name"),
        ({"lr": "0.1"}, "lr='0.1': give a number, or a list of numbers"),
        ({"batch_size": torch.tensor([4])}, "batch_size=.*: give a number, or a list"),
        ({"seeds": 1.5}, "seeds=1.5: give a whole number"),
        (
            {"optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr), "lr": None},
            "needs a rate: give lr, as --lr",
        ),
    ],
)
def test_mistakes(changed, message):
    with pytest.raises(UsageError, match=message):
        compared(**changed)


@pytest.mark.parametrize("call", [stretto.train, stretto.compare])
def test_calls_under_a_launcher_say_what_to_do_instead(monkeypatch, folder, call):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"has started 2 processes .* run it without torchrun, with workers=2"):
        call(build, data, loss=mse_loss, optimizer=sgd, lr=0.01, workers=2)
    assert not list(folder.iterdir())


SCRIPT = """
import torch, stretto
from stretto.report import html
from torch import nn

html._bundle = str  # Vega takes seconds, and is tested elsewhere

def build():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
pair = (x, x.sum(1, keepdim=True))
print("once")
study = stretto.compare(build, (pair, pair), methods=("backprop", "1f1b"), loss=lambda o, t: ((o - t) ** 2).mean(),
                        optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr), lr=0.1, steps=2, stages=2, seeds=1,
                        evaluations=1, quiet=True, out="study", workers=WORKERS)
print(len(study.runs))
"""


PLAIN_PAGE = """
from stretto.report.html import write
from stretto.study import report_page

report_page.build = lambda page, path: write(page.title, path)  # charts take longer than the study
"""


def test_a_script_without_a_guard(folder):
    (folder / "script.py").write_text(PLAIN_PAGE + SCRIPT.replace("WORKERS", "None"))
    script = Forked([sys.executable, "script.py"], dict(os.environ), folder)
    out, err = script.communicate(600)
    assert (script.returncode, out) == (0, "once\n2\n"), err
    assert len(json.loads((folder / "study" / "study.json").read_text())["settings"]["sources"]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["None", "2"])
def test_a_script_without_a_guard_in_a_fresh_process(folder, workers):
    (folder / "script.py").write_text(SCRIPT.replace("WORKERS", workers))
    ran = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False, timeout=600)
    assert (ran.returncode, ran.stdout) == (0, "once\n2\n"), ran.stderr
    assert len(json.loads((folder / "study" / "study.json").read_text())["settings"]["sources"]) == 5
