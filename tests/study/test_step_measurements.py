"""Whole steps measured for a plan: once for a calibration, together, and what is said of those that fail."""

import json

import pytest

from stretto.cli.program import main
from stretto.cost import find_cluster
from stretto.errors import UsageError
from stretto.plan import Problem, search
from stretto.plan.candidate_costs import Prices
from stretto.plan.refine import refined
from stretto.plan.trials import TrialFailedError
from stretto.study import trial_processes, whole_steps
from stretto.study.trial_processes import count_bytes
from stretto.study.whole_steps import ROUNDS, STEPS, TOLD, with_measured_steps


@pytest.fixture
def groups(monkeypatch):
    """Groups of processes that train in no time; what they were asked, in order."""
    asked = []

    class Group:
        def __init__(self, training, task=None):
            self.task = task
            self.name = f"{training['method']}, {training.get('workers', 1)} {training.get('sync', '')}".strip()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append(("end", self.name))

        def hear(self):
            assert self.task is count_bytes
            return [1e6, 2e6]

        def await_ready(self):
            if "tensor" in self.name or "reshard" in self.name:
                raise TrialFailedError("RuntimeError: no such thing")

        def fill(self):
            asked.append(("fill", self.name))

        def turn(self):
            asked.append(("turn", self.name))
            return 0.01 * len([each for each in asked if each == ("turn", self.name)])

    for module in (trial_processes, whole_steps):
        monkeypatch.setattr(module, "TrialGroup", Group)
    return asked


def planned(model, file):
    return Problem(
        costs=model.costs,
        cluster=find_cluster(str(file)),
        workers=2,
        batch_sizes=(32,),
        tensor_costs=model.tensor_costs,
    )


def test_steps_are_measured_once_and_by_turns(here, model, groups):
    file, told = here.with_suffix(".steps.json"), []
    given = planned(model, here)
    found = with_measured_steps(given, model.trained, "key", told.append, file=file)
    assert told == list(range(1, TOLD + 1))
    turns = [name for what, name in groups if what == "turn"]
    assert turns == turns[: len(turns) // ROUNDS] * ROUNDS
    assert "fully-shard(reshard=True)" not in found.ratios
    expected = search(given.but(methods=("backprop",), workers=1)).best
    all_turns_but_the_first = 0.04  # the median
    assert found.ratios["one worker"] == pytest.approx(all_turns_but_the_first / expected.seconds, rel=0.01)
    (walked,) = refined([expected], Prices(given))
    assert found.byte_ratios["one worker"] == pytest.approx(2e6 / max(walked.bytes))
    (corrected,) = refined([expected], Prices(found))
    assert max(corrected.bytes) == pytest.approx(2e6)
    assert found.cluster.doubts == (
        "no step could be measured on this machine, fully-shard(reshard=True): RuntimeError: no such thing",
    )
    again = with_measured_steps(given.but(methods=("pb",)), model.trained, "key", told.append, file=file)
    assert found.spreads.keys() == found.ratios.keys()
    assert found.spreads["one worker"] == pytest.approx(0.01 / all_turns_but_the_first)  # of 0.03, 0.04 and 0.05
    assert {again.but(methods=given.methods) == found, again == found} == {True, False}
    assert told == list(range(1, TOLD + 1))
    for number, change in enumerate([{"key": "other"}, {"anew": True}], 2):
        with_measured_steps(given, model.trained, **{"key": "key", "tell": told.append, "file": file} | change)
        assert len(told) == number * TOLD


def test_a_damaged_file_says_so(here):
    file = here.with_suffix(".steps.json")
    file.write_text(json.dumps({"steps": {"key": {"replicas": {"seconds": 1.0}}}}))
    with pytest.raises(
        UsageError, match=r"cluster.steps.json holds no steps .* delete it, and they are measured again"
    ):
        STEPS.read(file)


@pytest.mark.slow
def test_a_plan_on_this_machine(here, tmp_path, capsys):
    words = ["plan", "--model", "mlp", "--cluster", str(here), "--out", str(tmp_path / "p.toml"), "--json"]
    only = ["--pipeline", "2", "--methods", "1f1b", "--microbatches", "4"]
    assert main([*words, *only]) == 0
    found = json.loads(capsys.readouterr().out)
    ((kept,),) = [list(json.loads(here.with_suffix(".steps.json").read_text())["steps"].values())]
    assert kept["pipeline"]["plan"]["method"] == "1f1b(microbatches=4)"
    assert all(row["seconds"] > 0 and not row["failure"] for row in kept.values())
    assert found["predicted_seconds"] == pytest.approx(kept["pipeline"]["seconds"])  # the very plan that was measured
    assert found["corrections"].keys() == {"pipeline"}
    assert max(found["predicted_bytes"]) == kept["pipeline"]["bytes"]
    assert main([*words, *only, "--layers", "counted"]) == 0
    assert json.loads(capsys.readouterr().out)["corrections"] == {"pipeline": 1.0}
