"""stretto inspect: a run's own measurements, or how to get them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from stretto.cli import main
from stretto.heads.head import First
from stretto.settings.runs import TrainSettings
from stretto.study.prepare import resolve
from stretto.study.report_page import description, inspected
from stretto.study.training_run import Task

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--steps", "12", "--evaluations", "4", "--quiet"]


TIED = """
import torch
from torch import nn


def build():
    layers = [nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9, bias=False)]
    layers[2].weight = layers[0].weight
    return layers


def data():
    x = torch.arange(32).view(8, 4) % 9
    return (x, 8 - x), (x, 8 - x)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_and_what_it_measured(capsys):
    words = ["--method", "greedy(head=two-layer)", "--measure", "cosine,probes,filters", "--out", "run"]
    assert main(["train", *SMALL, *words]) == 0
    assert main(["inspect", "run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (run,) = told["runs"]
    assert told["report"] == "run/inspect.html"
    assert run["method"] == "greedy(head=two-layer)"
    assert run["heads"] == ["two-layer"] * 2 + ["its output"]
    assert run["delays"] == [0, 0, 0]
    assert run["missing"] == []
    assert run["measured"][-1]["cosines"][-1] == pytest.approx(1)
    assert len(run["measured"][-1]["probes"]) == 3
    assert main(["inspect", "run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said if line.startswith("stage")] == [
        ["stage", "head", "delay", "head's", "loss", "cosine", "probe"]
    ]
    assert max(map(len, said)) <= 80


def test_random_labels_are_learned_by_heart(capsys):
    words = ["--data-options.random_labels", "true", "--lr", "0.05", "--out", "run", "--quiet"]
    assert main(["train", *words, "--model-options.depth", "3", "--steps", "300", "--evaluations", "4"]) == 0
    assert main(["inspect", "run", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["train_accuracy"] > 0.3
    assert main(["inspect", "run"]) == 0
    assert f"accuracy {run['train_accuracy']:.1%}".replace("%", " %") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "heads"),
    [
        ("1f1b(microbatches=2)", ("", "", "its output")),
        ("pb", ("", "", "its output")),
        ("greedy(head=language)", ("language, 3 minibatches behind", "language", "its output")),
    ],
)
def test_weights_are_behind_where_their_versions_travel_down(method, heads):
    """Under pipelines a borrower has the weights that the first stage has."""
    Path("tied.py").write_text(TIED)
    wanted = {"model": "tied.py:build", "data": "tied.py:data", "stages": 3, "steps": 2, "batch_size": 4}
    task = Task(resolve(TrainSettings(method=method, **wanted)), Path("run"))
    assert inspected(SimpleNamespace(tasks=[task]), SimpleNamespace(id=task.settings.id)).heads == heads


@pytest.mark.usefixtures("plain_pages")
def test_a_study_that_measured_nothing(capsys):
    words = ["--methods", "backprop,pb", "--lr", "0.01", "--batch-size", "32", "--seeds", "1", "--out", "study"]
    assert main(["compare", *SMALL, *words, "--jobs", "1"]) == 0
    assert main(["inspect", "study"]) == 0
    said = capsys.readouterr().out
    assert said.count("not measured: no cosines") == 2
    assert "--measure cosine,probes,filters" in " ".join(said.split())


def test_nothing_there(capsys, tmp_path):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "nothing to report in" in capsys.readouterr().err


def test_what_holds_one_module_is_called_by_that():
    assert description(First(nn.Sequential(nn.Linear(2, 3)))) == "Linear"
    assert description(nn.Sequential(nn.Linear(2, 3), nn.ReLU())) == "Linear, ReLU"
