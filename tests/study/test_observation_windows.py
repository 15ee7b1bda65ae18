"""When a run is observed, and that it is the same run."""

import json
from dataclasses import replace

import pytest

from stretto.report.record import Observation
from stretto.settings.runs import TrainSettings
from stretto.study import run
from stretto.study.evaluation import WINDOW_MINIBATCHES, window_starts
from stretto.study.prepare import resolve
from stretto.study.store import read_run

SETTINGS = TrainSettings(
    model_options={"depth": 4, "width": 8}, steps=80, evaluations=2, batch_size=32, method="pb-lwp-sc", lr=0.003
)


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """The folder and the record of a run; no test changes them."""
    folder = tmp_path_factory.mktemp("observed") / "run"
    return folder, run(resolve(SETTINGS), folder)


def test_windows_lie_in_the_steady_state_and_end_before_the_run():
    for steps, drain in ((600, 14), (200, 0), (80, 6), (30, 6), (5, 14), (1, 0)):
        chosen = sorted(window_starts(steps, drain))
        assert 1 <= len(chosen) <= 8
        assert chosen[0] == min(2 * drain + 2, steps)
        assert chosen[-1] + WINDOW_MINIBATCHES + drain - 1 <= steps or len(chosen) == 1
    assert len(window_starts(600, 14)) == 8


def test_observations_are_kept_with_the_run(observed):
    folder, record = observed
    assert len(record.observations) >= 3
    assert read_run(folder)[1] == record
    last = record.observations[-1]
    assert all(last.mismatch[stage] > 0 for stage in range(3))
    assert last.mismatch[:3] == last.prediction_error[:3]  # pb predicts up to its backward
    assert last.weight_bytes[3] < last.weight_bytes[2]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = [Observation.from_json(event) for event in events if event["event"] == "observation"]
    assert tuple(kept) == record.observations


def test_a_run_is_the_same_without_observations(observed, tmp_path, monkeypatch):
    folder, record = observed
    monkeypatch.setattr("stretto.study.evaluation.window_starts", lambda steps, drain: set())
    plain = run(resolve(SETTINGS), tmp_path / "plain")
    assert plain.observations == ()
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert [point.train_loss for point in plain.points] == [point.train_loss for point in record.points]


def test_a_run_that_diverges_in_a_window(tmp_path):
    record = run(resolve(replace(SETTINGS, lr=1e6, method="pb", steps=30)), tmp_path / "run")
    assert record.diverged
    assert read_run(tmp_path / "run")[1] == record
