"""The list of runs leaves no method and no sync out, and digests are of every bit."""

import json

import pytest
import torch

from recorded import compare
from recorded.networks import NETWORKS
from recorded.pages import PAGES
from recorded.runs import COMMANDS, METHODS, RUNS, WITHOUT_REPLICAS, Run
from recorded.training import OPTIMIZERS, SCHEDULERS, emulated, of_numbers, of_tensors
from stretto.collectives import ALGORITHMS
from stretto.heads import HEADS
from stretto.methods import METHODS as TABLE
from stretto.replicas.sync_options import CHOICES, HOOKS


def bare(text):
    return text.partition("(")[0]


def test_every_method_runs_emulated_on_processes_and_from_a_checkpoint():
    assert set(METHODS) == set(TABLE)
    assert {bare(run.method) for run in RUNS if run.processes == 1} >= {*TABLE, "csv"}
    assert {bare(run.method) for run in RUNS if run.processes == 2} >= {*TABLE}
    assert {bare(run.method) for run in RUNS if run.stops == "reload"} == set(TABLE)
    assert {bare(run.method) for run in RUNS if run.data == 2} == set(TABLE) - set(WITHOUT_REPLICAS)


@pytest.mark.parametrize("option", ["recompute", "warmup", "finish", "predict", "stash", "spike", "horizon", "head"])
def test_options_of_methods_run(option):
    assert any(f"{option}=" in run.method for run in RUNS)


def test_every_sync_runs_emulated_on_processes_and_from_a_checkpoint():
    for processes in (1, 2):
        replicas = [run for run in RUNS if run.processes == processes and run.data > 1]
        assert {bare(run.sync) for run in replicas} == set(CHOICES)
        assert {bare(run.sync) for run in replicas if run.stops == "reload"} == set(CHOICES)
    assert all(any(f"hook={hook}" in run.sync for run in RUNS) for hook in HOOKS)


def test_every_algorithm_of_the_list_and_every_head_runs():
    assert all(any(f"algorithm={name}" in run.sync for run in RUNS if run.processes == 2) for name in ALGORITHMS)
    assert all(any(f"head={name}" in run.method for run in RUNS) for name in HEADS)


def test_networks_optimizers_and_schedulers_run():
    assert {run.network for run in RUNS} == {*NETWORKS} - {"short"}  # that one is for formats.py
    assert {run.optimizer for run in RUNS} == set(OPTIMIZERS)
    assert {run.scheduler for run in RUNS} == {None, *SCHEDULERS}
    assert {run.options.get("precision") for run in RUNS} == {None, "bf16", "bf16-autocast"}
    assert any(run.tensor > 1 for run in RUNS)
    assert any(run.space != (1, 1) for run in RUNS)


def test_the_record_has_the_runs_of_the_list():
    names = [*(run.name for run in RUNS), *(each.name for each in COMMANDS), *(f"page | {name}" for name in PAGES)]
    record = json.loads(compare.DIGESTS.read_text())
    assert list(record["runs"]) == names
    assert len(set(names)) == len(names)
    assert not any("error" in digests for digests in record["runs"].values())


def test_some_runs_are_as_recorded():
    record = json.loads(compare.DIGESTS.read_text())
    for name in ("1f1b | mlp", "pb-lwp-sc | mlp | stops reload", "greedy | mlp | data 2 | sync diloco(every=2)"):
        [run] = [each for each in RUNS if each.name == name]
        found = emulated(run)
        if record["machine"] == compare.machine():
            assert found == record["runs"][name]
        else:
            assert float(found["last"]) == pytest.approx(float(record["runs"][name]["last"]), rel=1e-3)


def test_a_digest_is_of_names_dtypes_shapes_and_every_bit():
    one = torch.ones(2, 3)
    others = [
        {"w": one, "b": one},
        {"v": one},
        {"w": one.T},
        {"w": one.double()},
        {"w": torch.nextafter(one, one + 1)},
        {"w": torch.full((2, 3), 1.0 + 2**-7, dtype=torch.bfloat16)},
        {"w": torch.full((2, 3), 1.0, dtype=torch.bfloat16)},
    ]
    assert len({of_tensors(each) for each in [{"w": one}, *others]}) == len(others) + 1
    assert of_tensors({"w": one.T.contiguous().T}) == of_tensors({"w": one})
    assert of_numbers([None, 0.1, {"loss": 0.3}]) != of_numbers([None, 0.1, {"loss": 0.1 + 0.2}])


def test_runs_that_differ_are_named(capsys):
    recorded = {"a": {"weights": "1", "last": "0.5"}, "b": {"json": "2"}, "c": {"json": "3"}}
    found = {"a": {"weights": "9", "last": "0.6"}, "b": {"json": "2"}, "d": {"error": "UsageError: no"}}
    assert compare.judged(found, recorded, "1 s") == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "a: other weights; last loss 0.6, was 0.5",
        "c: recorded, but no longer in the list",
        "d: not on record",
        "1 of 3 runs as recorded: 1 s",
    ]
    assert compare.judged({"b": {"json": "2"}}, {"b": {"json": "2"}}, "1 s") == 0


def test_another_machine_is_told_how_to_compare(tmp_path, capsys):
    file = tmp_path / "record.json"
    compare.write(file, {"machine": {**compare.machine(), "torch": "1.0"}}, {"a": {"json": "1"}, "b": {"json": "2"}})
    assert json.loads(file.read_text())["runs"] == {"a": {"json": "1"}, "b": {"json": "2"}}
    assert compare.read(file) is None
    told = capsys.readouterr().err
    assert f"torch: 1.0; here {torch.__version__}" in told
    assert "git worktree add" in told
    assert "--record" in told


def test_a_run_is_named_by_what_is_special_about_it():
    assert Run("pb").name == "pb | mlp"
    assert Run("pb", data=2, options={"clip": 1.0}).name == "pb | mlp | data 2 | clip 1.0"
