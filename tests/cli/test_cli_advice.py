"""What commands say of "async" and "local", and what becomes of a run when the advice has changed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import stretto
from cli.kills import SMALL
from stretto.cli import main
from stretto.methods import advice, findings

FINDING = next(each for each in findings.findings() if each.advice == "async")
STOPS = """\
import os, pathlib, signal
def stop(output, target):
    mark = pathlib.Path("stopped")
    if not mark.exists() and [*pathlib.Path().glob("**/step-2")]:
        mark.touch()
        os.kill(os.getpid(), signal.SIGINT)
    return 0 * output.mean()
"""


def advise(monkeypatch, *methods):
    """From here on the first of these methods is the best one for SGD."""
    known = tuple(
        replace(FINDING, method=method, optimizer="sgd", network="an MLP", stages=4, ratio=0.25 + index, low=0.2,
                high=0.5 + index, error=0.1, gap=index)
        for index, method in enumerate(methods)
    )  # fmt: skip
    monkeypatch.setattr(findings, "findings", lambda: known)


def run(capsys, *words):
    assert main([*map(str, words)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("plain_pages")
def test_train_and_compare_say_what_it_stands_for(capsys, tmp_path, monkeypatch):
    advise(monkeypatch, "pb", "pipedream")
    told = (
        "async stands for pb here: at a loss in 0.14 [0.11, 0.29] times the time of 1f1b, simulated: 0.25 [0.20, 0.50] "
    )
    told += (
        "times the steps of plain training (an MLP, 4 stages, sgd), each 0.57 times as long; 17.5 numbers a parameter"
    )
    words = ["train", *SMALL, "--method", "async", "--steps", 2, "--out", tmp_path / "run"]
    assert run(capsys, *words).count(told) == 1
    assert "stands for" not in run(capsys, *words, "--json")
    assert "stands for" not in run(capsys, "train", *SMALL, "--steps", 2, "--out", tmp_path / "named")
    words = ["compare", *SMALL, "--methods", "backprop,async", "--lr", 0.1, "--seeds", 1, "--jobs", 1, "--steps", 2]
    assert run(capsys, *words, "--out", tmp_path / "study").count(told) == 1


NORMS = """
import torch
from torch import nn


def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(6)])


def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return (x, x.tanh()), (x[:32], x[:32].tanh())
"""


@pytest.mark.usefixtures("plain_pages")
def test_train_and_compare_warn_of_chunks_that_idle(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    idle = "method 'local' stands for chunked(chunks=2), whose stages take turns within a chunk: workers idle 67% of"
    Path("norms.py").write_text(NORMS)
    short = ["--model", "norms.py:build", "--data", "norms.py:data", "--loss", "mse_loss", "--batch-size", 32]
    short += ["--evaluations", 1, "--steps", 2, "--stages", 6]
    assert idle in run(capsys, "train", *short, "--method", "local", "--out", tmp_path / "run")
    assert idle not in run(capsys, "train", *short, "--method", "chunked(chunks=2)", "--out", tmp_path / "named")
    words = ["compare", *short, "--methods", "local", "--lr", 0.1, "--seeds", 1, "--jobs", 1]
    assert idle in run(capsys, *words, "--out", tmp_path / "study")


def test_refusals_of_commands_say_it(capsys, tmp_path, monkeypatch):
    advise(monkeypatch, "pipedream-2bw")
    told = "method 'async' stands for pipedream-2bw (sgd, 4 stages): method pipedream-2bw cuts a minibatch into 4 "
    few = [*SMALL[:4], "--batch-size", "2", "--evaluations", "3", "--steps", "2"]
    for words in (
        ["train", *few, "--method", "async"],
        ["compare", *few, "--methods", "async"],
        ["compare", *few, "--methods", "backprop,async"],
        ["compare", *few, "--methods", "async,all"],
    ):
        assert main([*words, "--out", str(tmp_path / "none")]) == 2
        err = capsys.readouterr().err
        assert told in err
        assert "use --batch-size 4 or more, or fewer stages; or name another method, such as pipedream or 1f1b" in err


@pytest.mark.parametrize("out", [["--out", "run"], []])
def test_a_run_goes_on_with_the_method_that_it_began_with(capsys, tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(STOPS)
    words = ["train", *SMALL, "--method", "async(warmup=1)", "--metric", "stop=own.py:stop", "--steps", "6",
             "--checkpoint-every", "2", *out]  # fmt: skip
    advise(monkeypatch, "pb", "pipedream")
    assert main([*words, "--quiet"]) == 130
    advise(monkeypatch, "pipedream", "pb")  # a later version
    capsys.readouterr()
    said = run(capsys, *words, "--resume")
    now = "async(warmup=1) stands for pb(warmup=1) in this run, which goes on; it is pipedream(warmup=1) now"
    assert now in said
    (folder,) = tmp_path.glob("run") if out else tmp_path.glob("runs/train-*")
    saved = json.loads((folder / "run.json").read_text())
    assert saved["settings"]["method"] == "pb(warmup=1)"
    assert [each.name for each in folder.parent.glob(".*.checkpoints")] == []
    if out:
        assert "this run is finished already" in run(capsys, *words, "--resume")


def test_a_run_that_began_with_a_method_of_another_kind_does_not_go_on(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(STOPS)
    words = ["train", *SMALL, "--metric", "stop=own.py:stop", "--steps", "6",
             "--checkpoint-every", "2", "--out", "run"]  # fmt: skip
    assert main([*words, "--method", "greedy", "--quiet"]) == 130
    assert main([*words, "--method", "async", "--resume"]) == 2
    assert "method: 'greedy' there, '1f1b' here" in capsys.readouterr().err


def test_plans_take_the_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--cluster", "16-workstations", "--workers", 4, "--model", "mlp", "--json", "--methods"]
    advise(monkeypatch, "pipedream-2bw(feedback=1)")
    facts = json.loads(run(capsys, *words, "async,gpipe"))
    meant = facts["words"]["async"]
    assert meant["methods"] == ["pipedream-2bw(feedback=1)"]
    assert meant["why"].startswith("on 4 stages async stands for pipedream-2bw(feedback=1) here: at a loss in 0.14 [")
    assert facts["chosen"]["method"].split("(")[0] in ("pipedream-2bw", "gpipe")
    told = run(capsys, *[word for word in words if word != "--json"], "async")
    assert "async in plans: pipedream-2bw(feedback=1); on 4 stages async stands for" in told
    assert json.loads(run(capsys, *words, "local"))["words"]["local"]["methods"] == ["local"]  # the family
    assert "words" not in json.loads(run(capsys, *words, "pb"))


def test_plans_take_the_words_with_heads(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--cluster", "16-workstations", "--workers", 4, "--model", "mlp", "--json", "--methods"]
    heads = json.loads(run(capsys, *words, "local(head=linear)", "--optimizer", "adamw"))
    assert "head=linear" in heads["chosen"]["method"]


def test_a_result_says_by_which_word_it_was_asked_for(capsys, tmp_path, monkeypatch):
    advise(monkeypatch, "pb")
    words = ["train", *SMALL, "--steps", 2, "--json", "--out"]
    told = json.loads(run(capsys, *words, tmp_path / "word", "--method", "async(warmup=1)"))
    assert (told["method"], told["asked"]) == ("pb(warmup=1)", "async(warmup=1)")
    assert "0.25 [0.20, 0.50] times the steps" in told["why"]
    assert "asked" not in json.loads(run(capsys, *words, tmp_path / "name", "--method", "pb"))


def test_simulate_chooses_by_the_times_that_it_simulates(capsys, monkeypatch):
    """A method that sends nothing back gains by slow messages; so little that it is not told without them."""
    found = replace(FINDING, advice="local", method="greedy", optimizer="adamw", stages=2, ratio=1.0, low=0.9, high=1.3)
    monkeypatch.setattr(findings, "findings", lambda: (found,))
    words = ["simulate", "--method", "local", "--stages", 2, "--json", "--latency"]
    assert json.loads(run(capsys, *words, 0))["method"] == "1f1b"  # 1.3 times 3 over 3.75
    assert json.loads(run(capsys, *words, 2))["method"] == "greedy"


def test_words_may_have_stood_for_methods_of_their_family_with_their_options():
    assert advice.may_stand_for("async(warmup=2)", "paci(every=8, warmup=2)")
    assert not advice.may_stand_for("async(warmup=2)", "paci(every=8)")
    assert not advice.may_stand_for("async", "chunked(chunks=2)")
    assert advice.may_stand_for("local", "chunked(chunks=2)")
    assert not advice.may_stand_for("local", "own.py:method")  # nothing that a file says is executed
    assert stretto.advised("async", "adamw", 8).advice[:4] == ("async", "adamw", 8, False)


def test_show_and_simulate_take_the_words(capsys):
    for command in (["show", "local", "--stages", 8], ["simulate", "--method", "local", "--stages", 8]):
        told = run(capsys, *command)
        assert told.startswith("local stands for chunked(chunks=2, microbatches=8) here: at a loss in")
        facts = json.loads(run(capsys, *command, "--json"))
        assert (facts["method"], facts["asked"]) == ("chunked(chunks=2, microbatches=8)", "local")
    assert "asked" not in json.loads(run(capsys, "show", "greedy", "--json"))
