"""A bubble of rounding noise is printed as none, everywhere; JSON keeps the number."""

import json
import re

import pytest

import stretto
from stretto.cli import main
from stretto.cli.plan_output import rows_of
from stretto.report.prediction import Comparison, PredictedRun, section
from stretto.schedule.draw import idle_share
from stretto.trainer.tracking import bubble_of


@pytest.mark.parametrize("share", [0.0, 1e-12, -1e-16, 0.0049])
def test_what_is_below_the_resolution_is_none(share):
    assert idle_share(share) == idle_share(share, 1) == "none"


def test_a_bubble_is_a_share():
    assert (idle_share(0.005, 1), idle_share(3 / 7), idle_share(1)) == ("0.5%", "43%", "100%")


@pytest.mark.parametrize("words", [["show", "pb"], ["simulate", "--method", "pb"]])
def test_commands(capsys, words):
    assert main(words) == 0
    assert re.search("a turn.*, none idle", capsys.readouterr().out)
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steady_bubble"] == 0


def test_rounding_of_floating_point_times_is_no_bubble(capsys):
    """0.1 + 0.2 is not 0.3 in floating point: three stages of such times leave a remainder, and no bubble."""
    assert main(["simulate", "--method", "pb", "--stages", "3", "--forward", "0.1", "--backward", "0.2"]) == 0
    assert "none idle" in capsys.readouterr().out


def test_a_plan():
    chosen = {"method": "pb", "data": 1, "pipeline": 2, "tensor": 1, "space": 1, "workers": 2, "bounds": [0, 1, 2],
              "sharding": "none", "batch_size": 8}  # fmt: skip
    for bubble, said in ((1e-12, "none"), (0.25, "250 ms")):
        parts = {"seconds_per_step": 1.0, "by": "x", "seconds": {"forward": 1.0, "bubble": bubble}}
        assert ("  bubble", said) in rows_of(chosen, parts | {"bytes_per_worker": [1]}, None)
    alone = rows_of(chosen | {"pipeline": 1}, parts | {"seconds": {"bubble": 0.0}, "bytes_per_worker": [1]}, None)
    assert "  bubble" not in dict(alone)


def test_a_report():
    class Specs:
        def add(self, name, chart):
            return name

    rows = (Comparison(name="worker 0 stands still", unit="s", measured=1e-19, predicted=0.3),)
    run = PredictedRun(run="r", method="pb", source="x", steps={1: 1.0, 2: 1.0}, seconds=1.0, rows=rows)
    (row,) = section(run, 0, Specs())["rows"]
    assert (row["measured"], row["predicted"]) == ("none", "300 ms")


def test_a_tracker_gets_no_negative_bubble():
    import torch

    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    trainer = stretto.Trainer(
        layers, torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), method="pb",
        example=torch.randn(2, 4),
    )  # fmt: skip
    assert bubble_of(trainer) == 0
