"""`--log` of train and compare: one run there for one run here, on any number of processes, with the report."""

import csv
import json
from pathlib import Path

import pytest

import stretto
from stretto.cli import main
from stretto.trainer.backend import Backend

SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--batch-size", "32", "--steps", "12"]
LOG = ["--log", "csv(every=4)"]
TIMED = ("seconds", "examples_per_second", "joules", "serial_flops")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, plain_pages):
    monkeypatch.chdir(tmp_path)


def rows(file):
    with Path(file).open(newline="") as opened:
        return {int(row["step"]): {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(opened)}


def without_times(table):
    return {step: {k: v for k, v in row.items() if k not in TIMED and "memory" not in k} for step, row in table.items()}


@pytest.mark.parametrize("method", ["pb", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_two_processes_log_what_one_logs(method, capsys):
    words = ["train", *SMALL, "--method", method, *LOG, "--quiet"]
    assert main([*words, "--out", "alone"]) == 0
    assert main([*words, "--out", "many", "--workers", "2"]) == 0, capsys.readouterr().err
    alone, many = (rows(f"logs/{name}/metrics.csv") for name in ("alone", "many"))
    assert [*many] == [*range(1, 13)]
    for step, row in without_times(alone).items():
        assert without_times(many)[step] == pytest.approx(row, rel=1e-5), step
    assert {key for key in many[4] if "memory" in key} == {"peak_memory_bytes/rank_0", "peak_memory_bytes/rank_1"}
    run = json.loads(Path("alone/run.json").read_text())
    assert many[12]["test_loss"] == pytest.approx(run["record"]["test_loss"], rel=1e-5)
    assert run["trackers"] == {"csv": "logs/alone"}
    assert "log" not in run["settings"]
    for name in ("alone", "many"):
        assert Path(f"logs/{name}/report.html").is_file()


def test_logging_is_no_part_of_what_makes_a_run(capsys):
    words = ["train", *SMALL, "--out", "run"]
    assert main([*words, *LOG, "--quiet"]) == 0
    assert main(words) == 0
    assert "finished already" in capsys.readouterr().out


def test_a_study_has_a_run_for_each_of_its_runs_and_one_for_the_report():
    settings = {"steps": 6, "batch_size": 32, "seeds": 1, "lr": 0.01, "model_options": {"width": 8, "depth": 3}}
    study = stretto.compare("mlp", "digits", methods=("backprop", "greedy"), out="study", quiet=True,
                            log=stretto.trackers.CSV(folder="kept"), jobs=1, **settings)  # fmt: skip
    assert {path.name for path in Path("kept/study").iterdir()} == {*(run["id"] for run in study.runs), "report"}
    for run in study.runs:
        assert rows(f"kept/study/{run['id']}/metrics.csv")[6]["validation_loss"] == run["validation_loss"]
    assert Path("kept/study/report/report.html").read_text() == study.report().read_text()
    assert json.loads(Path("kept/study/report/settings.json").read_text())["methods"] == ["backprop", "greedy"]


def test_an_unknown_tracker_is_told_before_anything_is_trained(capsys):
    assert main(["train", *SMALL, "--log", "tensorbord"]) == 2
    assert "did you mean 'tensorboard'" in capsys.readouterr().err
    assert list(Path().iterdir()) == []


def test_a_run_that_diverged_keeps_all_its_rows_and_is_failed(monkeypatch):
    closed = []
    monkeypatch.setattr("stretto.trackers.csv_files.CSVRun.close", lambda self, *, finished: closed.append(finished))
    assert main(["train", *SMALL, "--lr", "1e9", "--evaluations", "2", *LOG, "--out", "run", "--quiet"]) == 1
    assert closed == [False, False], "when training ended, and when the report was added"
    diverged = json.loads(Path("run/run.json").read_text())["record"]["diverged_at"]
    assert max(rows("logs/run/metrics.csv")) == diverged
    assert json.loads(Path("logs/run/settings.json").read_text())["model"] == "mlp"


def test_an_interrupted_asynchronous_run_has_every_loss_once(monkeypatch):
    words = ["train", *SMALL, "--method", "pb", *LOG, "--out", "run", "--quiet"]
    with monkeypatch.context() as patched:
        patched.setattr(Backend, "should_stop", lambda backend, step, *_: step == 7)
        assert main(words) == 130
    assert set(rows("logs/run/metrics.csv")) == set(range(1, 8))
    assert main([*words, "--resume"]) == 0
    table = rows("logs/run/metrics.csv")
    assert all("loss" in table[step] for step in range(1, 13))
    assert len(list(Path("logs").iterdir())) == 1
