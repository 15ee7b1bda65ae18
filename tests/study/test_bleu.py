"""BLEU beside a run: that of its weights, the same on processes, and asked for before anything is trained."""

import json
import sys
from dataclasses import replace

import pytest
import safetensors.torch

from stretto.errors import UsageError
from stretto.models.encoder_decoder import find_bleu, score
from stretto.nn.chain import Chain
from stretto.runtime.launch import LaunchSettings
from stretto.settings.runs import CompareSettings, TrainSettings
from stretto.study import compare, open_study, run
from stretto.study.measurements import BLEU_EXAMPLES
from stretto.study.prepare import costs_of, dataset, prepare, resolve
from stretto.study.run_processes import run_on_processes
from stretto.study.store import read_run

SETTINGS = TrainSettings(
    model="encoder-decoder",
    model_options={"depth": 1, "width": 16},
    data="number-words",
    data_options={"limit": 1000, "examples": 1000},
    method="pb",
    steps=60,
    evaluations=2,
    lr=0.01,
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bleu") / "run"
    return folder, run(resolve(SETTINGS), folder)


def test_bleu_is_that_of_the_weights_and_is_written(emulated):
    folder, record = emulated
    assert read_run(folder)[1] == record
    settings = resolve(SETTINGS)
    model, data = Chain(*prepare(settings).trainer.stages), dataset(settings)
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    with_these = model, data.validation.x[:BLEU_EXAMPLES], data.validation.y[:BLEU_EXAMPLES], data.text, find_bleu()
    assert record.validation_bleu == record.points[-1].validation_bleu == score(*with_these)
    assert record.test_bleu == score(model, data.test.x, data.test.y, data.text, find_bleu())
    assert record.test_bleu > record.points[0].validation_bleu


@pytest.mark.slow
def test_on_processes_it_is_the_same(emulated, tmp_path):
    settings = resolve(replace(SETTINGS, workers=2))
    run_on_processes(
        settings, tmp_path / "run", lambda *_: None, LaunchSettings(workers=2), costs_of(prepare(settings))
    )
    record = read_run(tmp_path / "run")[1]
    assert record.test_loss == pytest.approx(emulated[1].test_loss, rel=1e-5)
    assert record.test_bleu == pytest.approx(emulated[1].test_bleu, rel=1e-5)
    assert len(record.points) == 2


@pytest.mark.usefixtures("no_pictures")
def test_a_study_tells_it_beside_the_loss(tmp_path):
    settings = CompareSettings(
        **{key: getattr(SETTINGS, key) for key in ("model", "model_options", "data")},
        data_options={"limit": 1000, "examples": 200},
        evaluations=1,
        methods=("backprop",),
        steps=4,
        lr=(0.01,),
        batch_size=(8,),
        seeds=1,
    )
    outcome = compare(open_study(settings, tmp_path / "study"), jobs=1)
    content = json.loads(json.dumps(outcome.to_json(), allow_nan=False))
    assert all({"validation_bleu", "test_bleu"} <= set(each) for each in content["runs"])
    assert "val. BLEU" in outcome.report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_low_precision_is_scored_by_its_weights(tmp_path):
    record = run(resolve(replace(SETTINGS, steps=4, precision="bf16")), tmp_path / "run")
    assert 0 <= record.test_bleu <= 100


def test_other_tasks_have_none(tmp_path):
    settings = TrainSettings(model_options={"depth": 2, "width": 8}, steps=2, evaluations=1)
    record = run(resolve(settings), tmp_path / "run")
    assert (record.validation_bleu, record.test_bleu) == (None, None)


def test_without_sacrebleu_nothing_is_trained(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError, match="the package sacrebleu computes, and it is not installed"):
        prepare(resolve(SETTINGS))
