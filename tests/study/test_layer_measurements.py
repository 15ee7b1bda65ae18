"""Layers measured for a plan: which sizes, where, once for a calibration, and what a damaged file says."""

import json
from dataclasses import replace

import pytest
import torch

from stretto.cli.program import main
from stretto.cost import find_cluster
from stretto.cost.layer_table import Affine, Measured
from stretto.errors import UsageError
from stretto.settings.runs import TrainSettings
from stretto.study import layer_measurements
from stretto.study.layer_measurements import LAYERS, is_measurable, repeated, sizes_of, with_measured_layers
from stretto.study.model_costs import CostRequest, costed


def test_sizes_are_a_minibatch_and_parts_of_it():
    assert sizes_of(64) == [64, 32, 8]
    assert sizes_of(1) == [2, 1]
    assert repeated(torch.arange(3), 7).tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert repeated({"x": torch.arange(2)}, 3)["x"].tolist() == [0, 1, 0]


def test_only_this_machine_is_measured(here, model):
    assert is_measurable(model, find_cluster(str(here)))
    assert not is_measurable(model, find_cluster("16-workstations"))
    assert not is_measurable(replace(model, resolved=None), find_cluster(str(here)))  # as networks without data


@pytest.mark.slow
def test_no_network_without_data_is_measured(here):
    model = costed(TrainSettings(model="resnet50", optimizer="sgd"), CostRequest(heads=()))
    assert not is_measurable(model, find_cluster(str(here)))


def test_layers_are_measured_once_and_cut_ones_follow(here, model, monkeypatch):
    times = Measured(Affine(1e-3, 1e-5), Affine(2e-3, 2e-5), Affine(1e-3), Affine(1e-3), 1e-4, 1e-5, contention=1.5)
    asked = []

    def measured(*given):
        asked.append(given)
        return {"layers": [layer_measurements.asdict(times)] * len(model.costs.layers), "start": 1e-5, "step": 2e-5}

    monkeypatch.setattr(layer_measurements, "measure_layers", measured)
    file = here.with_suffix(".layers.json")
    cluster = find_cluster(str(here))
    for number in (1, 1, 2):
        found = with_measured_layers(model, cluster, 32, print, file=file, anew=number == 2)
        assert len(asked) == number
    assert found.costs.layers[3].measured == times
    assert (found.costs.start, found.costs.step) == (1e-5, 2e-5)
    part = found.tensor_costs[2].layers[3].measured
    assert part.contention == 1.5
    assert 0.4 < part.forward.at(32) / times.forward.at(32) < 1
    with_measured_layers(model, cluster, 64, print, file=file)
    assert len(asked) == 3
    file.write_text(json.dumps({"layers": {"key": {"layers": [{}]}}}))
    with pytest.raises(UsageError, match=r"cluster.layers.json holds no layers .* delete it"):
        LAYERS.read(file)


def test_other_machines_cannot_be_measured_on_demand(capsys):
    assert main(["plan", "--model", "mlp", "--cluster", "16-workstations", "--layers", "measured"]) == 2
    assert "is another one or has unequal workers, or stretto train cannot" in capsys.readouterr().err
    assert main(["plan", "--model", "mlp", "--cluster", "16-workstations", "--layers", "guessed"]) == 2
    assert "Choose from auto, counted, measured" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_on_this_machine(here, tmp_path, capsys):
    words = ["plan", "--model", "mlp", "--cluster", str(here), "--out", str(tmp_path / "p.toml"), "--json"]
    assert main(words) == 0
    measured = json.loads(capsys.readouterr().out)
    known = json.loads(here.with_suffix(".layers.json").read_text())["layers"]
    ((found,),) = [list(known.values())]
    assert len(found["layers"]) == 9
    assert all(row["forward"]["each"] >= 0 and row["contention"] >= 1 for row in found["layers"])
    assert main([*words, "--layers", "counted"]) == 0
    assert json.loads(capsys.readouterr().out)["predicted_seconds"] != measured["predicted_seconds"]
