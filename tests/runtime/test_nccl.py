"""Values that go from device to device: the same numbers. NCCL's place is taken by gloo, which needs no GPU."""

import pytest
import torch

from runtime import scripts
from runtime.processes import launch
from runtime.scripts import same
from stretto.runtime.nccl import IDENTITY, identity

RUNS = [("1f1b", {}), ("overlapping", {}), ("pb-lwp-sc", {}), ("pipedream-2bw", {})]


@pytest.mark.parametrize("runs", [RUNS[2:3], pytest.param(RUNS, marks=pytest.mark.slow)], ids=["one", "all"])
def test_they_are_those_of_emulation(runs):
    told = launch(2, "runtime.scripts:between_devices", "train_all", runs, 5)
    for number, (method, options) in enumerate(runs):
        losses, weights, evaluated = scripts.train(method, workers=2, **options)
        assert all((each[number][0], each[number][2]) == (losses, evaluated) for each in told), method
        assert same(told[0][number][1], weights), method


@pytest.mark.parametrize("script", ["tied", "shapes_that_change"])
def test_whatever_travels(script):
    told = launch(2, "runtime.scripts:between_devices", script, "pb")
    *wanted, weights = getattr(scripts, script)("pb", workers=2)
    assert all(list(each[: len(wanted)]) == wanted for each in told)
    assert same(told[0][-1], weights)


def test_what_was_in_flight_is_dropped(tmp_path):
    told = launch(2, "runtime.scripts:between_devices", "loaded_in_flight", "pb", tmp_path / "processes")
    losses, weights = scripts.loaded_in_flight("pb", tmp_path / "emulated", workers=2)
    assert [each[0] for each in told] == [losses, losses]
    assert same(told[0][1], weights)


def test_a_cpu_is_no_such_device():
    assert identity(torch.device("cpu")) == bytes(IDENTITY)
