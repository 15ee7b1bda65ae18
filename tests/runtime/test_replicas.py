"""Law 2 with a data axis: replicas on real processes come to the numbers of emulation and of one device."""

import sys
from pathlib import Path

import pytest
import torch

from runtime import processes, replicated
from runtime.processes import launch, speakers
from runtime.scripts import same
from stretto import Mesh

TWO = Mesh(data=2)
RUNS = [
    ("1f1b", {}), ("pb", {}), ("greedy", {}), ("pb", {"norm": True}), ("1f1b", {"clip": 0.1}),
    ("pipedream", {"precision": "bf16"}), ("pb", {"sync": "all-reduce(hook=bf16)"}),
    ("1f1b", {"sync": "all-reduce(algorithm=ring)"}), ("pb", {"sync": "local-sgd(every=3)"}),
    ("pipedream-2bw", {"sync": "diloco(every=2)"}), ("pb", {"sync": "local-sgd(every=2,start=3)"}),
    ("1f1b", {"ignored": 5, "clip": 0.1}), ("overlapping", {"ignored": 5}), ("paci", {"ignored": 9}),
    ("pb", {"ignored": 3, "sync": "local-sgd(every=3)"}), ("zb-h1", {"ignored": 5, "sync": "all-reduce(hook=bf16)"}),
]  # fmt: skip
POWER = ("1f1b", {"sync": "all-reduce(hook=powersgd)", "steps": 16})


@pytest.mark.slow
def test_two_pipelines_of_two():
    """Two addends have one sum, so that even the last bit is the same."""
    told = launch(4, "runtime.replicated:train_all", [(method, TWO, o) for method, o in (*RUNS, POWER)], timeout=400)
    for number, (method, options) in enumerate(RUNS):
        losses, weights, evaluated = replicated.train(method, TWO, workers=2, **options)
        for rank in range(4):
            assert told[rank][number][0] == losses, (method, rank)
            assert told[rank][number][2] == evaluated, (method, rank)
            assert (told[rank][number][1] is None) == (rank > 0)
        assert same(told[0][number][1], weights), method
    for number, (method, options) in enumerate(RUNS[:3]):
        losses, weights, _ = replicated.train(method, workers=2, **options)
        assert told[0][number][0] == pytest.approx(losses, abs=1e-9)
        assert all(torch.allclose(told[0][number][1][key], weights[key], rtol=0, atol=1e-9) for key in weights)
    losses = replicated.train(POWER[0], steps=16)[0]
    assert told[3][-1][0][:10] == pytest.approx(losses[:10], abs=1e-12)  # it begins later
    assert told[3][-1][0] == pytest.approx(losses, abs=1e-2)


def test_large_gradients_are_summed_where_they_are():
    told = launch(2, "runtime.replicated:train_in_place", ["backprop", "pb"])
    for number, method in enumerate(["backprop", "pb"]):
        losses, weights, _ = replicated.train(method, TWO)
        assert told[1][number][0] == losses
        assert same(told[0][number][1], weights)


def test_sums_of_gradients_of_all_sizes_and_strides():
    (first, sums), (second, others) = launch(2, "runtime.replicated:sums", 2)
    for one, other, total, its in zip(first, second, sums, others, strict=True):
        assert torch.equal(one + other, total)
        assert torch.equal(total, its)


def test_a_checkpoint_goes_on_with_another_number_of_replicas(tmp_path):
    folder = str(tmp_path / "checkpoint")
    told = launch(2, "runtime.replicated:save_in_the_middle", "backprop", TWO, folder)
    whole = replicated.save_in_the_middle("backprop", TWO, str(tmp_path / "emulated"))
    assert same(told[0], whole)
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "manifest.json", "stage-0", "stage-1", "stage-2", "stage-3",
    ]  # fmt: skip
    for number in (1, 3):
        other = replicated.resume("backprop", Mesh(data=number), folder)
        assert all(torch.allclose(other[key], whole[key], rtol=0, atol=1e-12) for key in whole)
    (other, _) = launch(2, "runtime.replicated:resume", "backprop", None, folder)
    assert all(torch.allclose(other[key], whole[key], rtol=0, atol=1e-12) for key in whole)


SCRIPT = Path(__file__).with_name("faulty_replicas.py")


def run(kind, number, sync="all-reduce", *, whole):
    return processes.run(number, [sys.executable, str(SCRIPT), kind, sync], whole=whole)


def test_an_error_in_one_replica_ends_all_and_is_said_once(whole):
    statuses, said = run("error", 4, whole=whole)
    assert statuses == [1, 1, 1, 1]
    assert speakers(said, "Traceback") == [3]
    assert "ValueError: bad luck" in said[3]
    assert "in action 1F5: stage 1, micro-batch 5" in said[3]


@pytest.mark.slow
def test_a_killed_replica_is_missed_once_by_its_number(whole):
    statuses, said = run("killed", 3, whole=whole)
    assert sorted(statuses) == [-9, 1, 1]
    assert statuses[2] == -9
    assert len(speakers(said, "worker 2 is gone: it ended without a word")) == 1
    assert len(speakers(said, "Traceback")) == 1


def test_axes_that_do_not_multiply_are_refused_once(whole):
    statuses, said = run("axes", 3, whole=whole)
    assert statuses == [1, 1, 1]
    assert len(speakers(said, "3 processes for Mesh(data=2, tensor=1, space=(1, 1))")) == 1
    assert len(speakers(said, "start 2 or 4, or choose data from 1, 3")) == 1
