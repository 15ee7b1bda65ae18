"""Measuring beside a run: the numbers of the run stay, those that are measured are those of its weights."""

import json
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

from stretto.analysis.gradient_cosine import alignment
from stretto.analysis.linear_probes import probes
from stretto.analysis.noise_scale import noise_scale
from stretto.analysis.sharpness import sharpness
from stretto.settings.runs import MEASURES, TrainSettings
from stretto.study import run
from stretto.study.checkpoints import Progress
from stretto.study.evaluation import (
    COSINE_EXAMPLES,
    NOISE_BATCH,
    NOISE_EXAMPLES,
    PROBE_EXAMPLES,
    SHARP_EXAMPLES,
    ModelCopy,
    sample,
)
from stretto.study.prepare import build_model, dataset, prepare, rate_and_momentum, resolve, scheduler
from stretto.study.store import read_run

SETTINGS = TrainSettings(model_options={"depth": 3, "width": 8}, steps=12, evaluations=4, batch_size=16)
BOTH = ("sharpness", "noise")


def events(folder):
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()][1:]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


@pytest.mark.parametrize(
    "method",
    ["greedy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pb", "backprop", "pb-lwp", "pipedream"))],
)
def test_a_run_comes_to_the_same_numbers(tmp_path, method):
    settings = resolve(replace(SETTINGS, method=method))
    run(settings, tmp_path / "without")
    run(replace(settings, measure=MEASURES), tmp_path / "with")
    seen = events(tmp_path / "with")
    assert [each for each in seen if each["event"] != "measurement"] == events(tmp_path / "without")
    assert sum(each["event"] == "measurement" for each in seen) == 3
    first, second = (tmp_path / name / "model.safetensors" for name in ("without", "with"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.slow), "bf16"])
def test_figures_are_those_of_the_weights(tmp_path, precision):
    settings = resolve(replace(SETTINGS, method="pb", measure=BOTH, precision=precision))
    record = run(settings, tmp_path / "run")
    assert read_run(tmp_path / "run")[1] == record
    assert [each.step for each in record.measurements] == [
        3,
        7,
        12,
    ]  # evaluated at 1, 3, 7 and 12: 7 is nearest to 6 and to 9
    built, train = build_model(settings), dataset(settings).train
    prepared = prepare(settings)
    weights = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    model = nn.Sequential(*prepared.trainer.stages).float()
    model.load_state_dict(weights)
    few = sample(train, SHARP_EXAMPLES)
    last = record.measurements[-1]
    assert last.sharpness == sharpness(model, built.loss, [(few.x, few.y)]).value > 0
    noise = noise_scale(model, built.loss, sample(train, NOISE_EXAMPLES).batches(NOISE_BATCH))
    assert (last.noise_trace, last.gradient_square) == (noise.trace, noise.square)


@pytest.mark.parametrize(
    "method", [pytest.param("greedy(head=two-layer)", marks=pytest.mark.slow), "chunked(head=infopro)"]
)
def test_what_is_measured_by_stage(tmp_path, method):
    settings = replace(SETTINGS, method=method, measure=("cosine", "probes", "filters"), precision="bf16")
    record = run(resolve(settings), tmp_path / "run")
    assert read_run(tmp_path / "run")[1] == record
    last = record.measurements[-1]
    trainer = prepare(resolve(replace(settings, precision="float32"))).trainer
    weights = safetensors.torch.load_file(tmp_path / "run" / "model.safetensors")
    parts = {f"{n}.": m for n, m in enumerate(trainer.stages)}
    parts |= {f"heads.{n}.": m for n, m in enumerate(trainer.heads) if m is not None}
    for prefix, part in parts.items():
        part.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    split, unseen = dataset(settings).train, dataset(settings).validation
    few, test = sample(split, COSINE_EXAMPLES), sample(unseen, PROBE_EXAMPLES)
    fitted = sample(split, PROBE_EXAMPLES)
    found = alignment(trainer.stages, trainer.heads, trainer.rules.reach, trainer.loss, [(few.x, few.y)])
    assert (last.cosines, last.local_losses) == (found.cosines, found.losses)
    assert last.cosines[-1] == pytest.approx(1)
    assert last.probes == probes(trainer.stages, (fitted.x, fitted.y), (test.x, test.y))
    assert last.filter_shape == (1, 8, 8)
    assert [len(each) for each in last.filters] == [128] * 8


def test_only_what_is_asked_for(tmp_path):
    record = run(resolve(replace(SETTINGS, steps=4, measure=("noise",))), tmp_path / "run")
    assert all(each.sharpness is None and each.noise_trace > 0 for each in record.measurements)


def test_a_twin_is_cut_where_the_run_is():
    settings = resolve(replace(SETTINGS, stages=2, bounds=(0, 1, 3)))
    prepared = prepare(settings)
    weights = prepared.trainer.gather()
    copied = ModelCopy(prepared).load(weights).model
    assert {key: value.tolist() for key, value in copied.state_dict().items()} == {
        key: value.tolist() for key, value in weights.items()
    }


def test_a_run_that_goes_on_keeps_what_was_measured(tmp_path):
    record = run(resolve(replace(SETTINGS, measure=("sharpness",))), tmp_path / "run")
    progress = Progress(measurements=list(record.measurements))
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))).measurements == progress.measurements
    old = {key: value for key, value in progress.to_json().items() if key != "measurements"}
    assert Progress.from_json(old).measurements == []


def test_scaled_rates_grow_from_that_of_the_reference_batch():
    settings = resolve(
        replace(SETTINGS, lr=0.1, batch_size=64, reference_batch=16, lr_scaling="linear", lr_warmup=0.25)
    )
    assert rate_and_momentum(settings) == (0.4, 0.9)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    made, rates = scheduler(settings)(optimizer), []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(("optimizer", "lr"), [("lars", 1.0), ("lamb", 0.01)])
def test_the_large_batch_optimizers_train(tmp_path, optimizer, lr):
    rest = {"model_options": {"depth": 2, "width": 32}, "lr_warmup": 0.1, "schedule": "cosine", "weight_decay": 1e-4}
    settings = resolve(replace(SETTINGS, optimizer=optimizer, lr=lr, steps=80, **rest))
    record = run(settings, tmp_path / "run")
    assert record.train_loss < 0.5 * record.points[0].train_loss
