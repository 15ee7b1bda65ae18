"""Replicas that share out their optimizer's state come to the numbers of those that have it all, with less memory."""

import pytest
import torch

import stretto
from runtime import shared_optimizer
from runtime.processes import launch
from runtime.scripts import same

RUNS = [
    *((name, {}) for name in ("adamw", "adagrad", "lamb")),
    ("adam", {"clip": 0.1, "scheduler": shared_optimizer.half}),
    ("sgd", {"precision": "bf16", "clip": 0.1}),
    ("sgd", {"method": "greedy", "clip": 0.1}),
]
FEW = [RUNS[0], *RUNS[3:5]]
EVERY = [
    *RUNS,
    *((name, {"precision": precision}) for name in shared_optimizer.OPTIMIZERS for precision in (None, "bf16")),
    ("adam", {"method": "zb-h1"}),
    ("adam", {"tied": True, "stages": 3}),
]
MORE = [
    *((name, {"stages": 4}) for name in ("sgd", "adamw", "lars")),
    *(("adam", {"method": each, "stages": 4}) for each in ("gpipe(recompute=True)", "zb-v", "interleaved", "chunked")),
    ("adamw", {"precision": "bf16", "clip": 0.1, "stages": 4}),
    ("adam", {"tied": True, "stages": 4}),
    ("adam", {"method": "overlapping", "stages": 4}),
]  # fmt: skip
KEPT = {"adamw": ("adamw", {}), "bf16": ("sgd", {"precision": "bf16"})}


def check_runs(told, runs, workers, data=2):
    """As emulated replicas, which have whole optimizers, to the last bit: on every process.

    But for the losses that are told of more than two, which gloo adds up in an order of its own.
    """
    for number, (name, options) in enumerate(runs):
        one = shared_optimizer.train(name, {**options, "workers": workers, "data": data})
        for process in told:
            losses, _, rates, norms, evaluated = process[number]
            wanted = one[0] if data == 2 else pytest.approx(one[0], rel=1e-6 if "precision" in options else 1e-12)
            assert losses == wanted, (name, options)
            assert [rate for rate in rates if rate is not None] == [
                r for r, own in zip(one[2], rates, strict=True) if own is not None
            ]
            assert (norms, evaluated) == (one[3], one[4]), (name, options)
        assert same(told[0][number][1], one[1]), (name, options)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Of two replicas, each in one process; the folder where checkpoints are; what emulated runs came to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    whole = {name: shared_optimizer.save(str(folder / f"emulated-{name}"), *run) for name, run in KEPT.items()}
    return launch(2, "runtime.shared_optimizer:everything", FEW, str(folder), KEPT), folder, whole


def test_two_replicas(told):
    check_runs([each["train"] for each in told[0]], FEW, 1)


@pytest.mark.slow
def test_two_replicas_and_other_optimizers():
    check_runs(launch(2, "runtime.shared_optimizer:train_all", RUNS), RUNS, 1)


def test_each_keeps_half_of_the_state(told):
    """In sizes of the weights: Adam's step works on four, weights, gradients and two of state, and leaves three."""
    for each in told[0]:
        assert each["held"] == pytest.approx((1 + 3 / 2, 1 + 2 / 2), abs=0.02)


@pytest.mark.parametrize("name", KEPT)
def test_checkpoints_are_those_of_whole_replicas(told, name):
    """Written by shares and read by emulation, three replicas and one device, and the other way round."""
    results, folder, whole = told
    optimizer, options = KEPT[name]
    assert all(same(each[kind][name], whole[name]) for each in results[:1] for kind in ("saved", "resumed"))
    for data, sync in ((2, "shard-optimizer"), (3, "shard-optimizer"), (1, "all-reduce")):
        found = shared_optimizer.resume(str(folder / name), optimizer, {**options, "data": data, "sync": sync})
        near = 0 if data == 2 else 0.02 if "precision" in options else 1e-12
        assert all(torch.allclose(found[key], whole[name][key], rtol=0, atol=near) for key in found)


@pytest.mark.slow
def test_two_pipelines_of_two():
    check_runs(launch(4, "runtime.shared_optimizer:train_all", MORE), MORE, 2)


@pytest.mark.slow
def test_replicas_of_cut_weights():
    """Two processes share a stage's weights, and each has a replica that shares its part's state."""
    runs = [(name, {"clip": 0.1, "precision": precision}) for name in ("sgd", "adamw") for precision in (None, "bf16")]
    told = launch(4, "runtime.shared_optimizer:train_all", [(name, {**each, "tensor": 2}) for name, each in runs])
    whole = launch(
        4, "runtime.shared_optimizer:train_all", [(n, {**each, "tensor": 2, "sync": "all-reduce"}) for n, each in runs]
    )
    for one, other in zip(told[0], whole[0], strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
        assert all(torch.allclose(one[1][key], other[1][key], rtol=0, atol=1e-6) for key in one[1])
        assert one[3] == pytest.approx(other[3], rel=1e-6)


@pytest.mark.slow
def test_three_replicas():
    """Sums are in the order of replicas, of any number of them."""
    check_runs(launch(3, "runtime.shared_optimizer:train_all", [(n, {**o, "data": 3}) for n, o in EVERY]), EVERY, 1, 3)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow), "lamb"])
def test_numbers_are_those_of_an_all_reduce(optimizer):
    """To the last bit without clipping, whose norms are added up share by share."""
    runs = [shared_optimizer.train(optimizer, {"sync": sync, "data": 3}) for sync in ("all-reduce", "shard-optimizer")]
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])
    one, other = (
        shared_optimizer.train(optimizer, {"sync": sync, "data": 3, "clip": 0.1})[1]
        for sync in ("all-reduce", "shard-optimizer")
    )
    assert all(torch.allclose(one[key], other[key], rtol=0, atol=1e-13) for key in one)


@pytest.mark.parametrize("method", ["pb", "pipedream-2bw", "spectrain"])
def test_methods_with_several_versions_of_weights_are_refused(method):
    with pytest.raises(stretto.UsageError, match=r"several versions of the weights, and shard-optimizer gathers"):
        shared_optimizer.build("sgd", method)
