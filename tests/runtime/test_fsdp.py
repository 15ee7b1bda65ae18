"""Replicas that share out their weights come to the numbers of those that have all of them, with less memory."""

import sys

import pytest
import torch

import stretto
from runtime import replicated, sharded
from runtime.processes import launch, start
from runtime.scripts import same
from stretto import FullyShard, Mesh

TWO = Mesh(data=2)
SHARE = {"sync": FullyShard(min_block=0)}
RUNS = [(method, SHARE) for method in ("backprop", "1f1b(microbatches=4)", "greedy", "overlapping")]
RUNS.append(("backprop", {**SHARE, "optimizer": "muon"}))  # which gathers matrices
MORE = [
    ("zb-h1", SHARE), ("zb-v", SHARE), ("interleaved", SHARE), ("chunked", SHARE), ("gpipe(recompute=True)", SHARE),
    ("backprop", {**SHARE, "norm": True}), ("zb-v", {"sync": "all-reduce"}), ("dualpipe-v", SHARE),
    ("overlapping", {**SHARE, "ignored": 5}),
]  # fmt: skip
FEW = RUNS[1::3]
AGAIN = [("1f1b", {"sync": FullyShard(reshard=True, min_block=0)})]  # gathered and summed with each micro-batch
NEAR = [  # norms are added up in another order; gradients of micro-batches too; sums are divided by counts afterwards
    ("1f1b", {**SHARE, "ignored": 5}), ("1f1b", {**SHARE, "clip": 0.1}), ("overlapping", {**SHARE, "clip": 0.1}),
    *AGAIN, ("zb-h1", {"sync": FullyShard(reshard=True)}),
]  # fmt: skip


def near(one, other):
    return one.keys() == other.keys() and all(torch.allclose(one[key], other[key], rtol=0, atol=1e-12) for key in one)


def check_runs(told, runs, workers):
    """As all-reduce emulated, to the last bit; as one device but for the order of sums."""
    for number, (method, options) in enumerate(runs):
        own = {key: value for key, value in options.items() if key != "sync"}
        losses, weights, evaluated = replicated.train(method, TWO, workers=workers, **own)
        for each in told:
            assert each[number][0] == losses, method
            assert each[number][2] == evaluated, method
        assert same(told[0][number][1], weights), method
        assert all(each[number][1] is None for each in told[1:])
        if not own.keys() & {"norm", "optimizer"}:  # Muon rounds gradients to bfloat16, and sums are in another order
            losses, weights, _ = replicated.train(method, workers=workers, **own)
            assert told[0][number][0] == pytest.approx(losses, abs=1e-12)
            assert near(told[0][number][1], weights), method


def check_near(told, runs, workers):
    """As all-reduce emulated, but for the order of sums."""
    for number, (method, options) in enumerate(runs):
        own = {key: value for key, value in options.items() if key != "sync"}
        losses, weights, evaluated = replicated.train(method, TWO, workers=workers, **own)
        assert told[-1][number][0] == pytest.approx(losses, abs=1e-12)
        assert told[-1][number][2] == pytest.approx(evaluated, abs=1e-12)
        assert near(told[0][number][1], weights), method


@pytest.mark.slow
def test_two_pipelines_of_two():
    runs = [*RUNS, *MORE]
    told = launch(4, "runtime.replicated:train_all", [(method, TWO, each) for method, each in (*runs, *NEAR)])
    check_runs(told, runs, 2)
    check_near([each[len(runs) :] for each in told], NEAR, 2)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Of two replicas, each in one process; and the folder where checkpoints are."""
    folder = tmp_path_factory.mktemp("checkpoints")
    whole = replicated.save_in_the_middle("1f1b", TWO, str(folder / "emulated"), sync="fully-shard")
    runs = [(method, TWO, each) for method, each in (*FEW, *AGAIN)]
    return launch(2, "runtime.sharded:everything", runs, str(folder)), folder, whole


def test_two_replicas(told):
    check_runs([each["train"] for each in told[0]], FEW, 1)


@pytest.mark.slow
def test_two_replicas_and_other_methods():
    check_runs(launch(2, "runtime.replicated:train_all", [(method, TWO, each) for method, each in RUNS]), RUNS, 1)


def test_sums_of_each_backward_are_there_when_the_next_one_adds_to_them(told):
    check_near([each["train"][len(FEW) :] for each in told[0]], AGAIN, 1)


def test_each_keeps_half(told):
    """In sizes of the weights: Adam's step works on four, and leaves three; inputs and losses are few bytes."""
    for each in told[0]:
        assert each["held"]["all"] == pytest.approx((4, 3), abs=0.02)
        assert each["held"]["share"] == pytest.approx((2, 1.5), abs=0.02)


def test_an_update_is_one_gathering_and_one_sum(told):
    """Of four micro-batches; with reshard each forward and each backward gathers, each backward adds up."""
    for each in told[0]:
        assert each["messages"] == {("1f1b", False): [1, 1], ("zb-h1", False): [1, 1], ("1f1b", True): [8, 4]}


@pytest.mark.parametrize("name", sharded.OPTIMIZERS)
def test_optimizers_that_look_at_norms_see_those_of_whole_layers(told, name):
    assert near(told[0][0]["optimizers"][name], sharded.adapt(name, None, "all-reduce"))


def test_a_layer_that_is_not_used_keeps_its_newest_weights(told):
    wanted = sharded.skipping(None, "all-reduce")
    assert near(told[0][0]["skipped"], wanted)


def test_checkpoints_are_those_of_whole_replicas(told):
    """Written by shares and read by emulation and one device, and the other way round."""
    results, folder, whole = told
    assert all(same(each, whole) for each in results[0]["saved"])
    for mesh, sync in ((Mesh(data=3), "fully-shard"), (None, "all-reduce")):
        assert near(replicated.resume("1f1b", mesh, str(folder / "sharded"), sync=sync), whole)


def test_what_processes_cannot_do_is_refused(told):
    for each in told[0]:
        scalar, observer = each["refused"]
        assert "scalar parameters. Change gain to a 1D tensor" in scalar
        assert "Or use sync='all-reduce'" in scalar
        assert "no process has whole weights to observe" in observer


@pytest.mark.slow
def test_a_killed_replica_is_missed_by_its_number():
    started = start(2, [sys.executable, "-c", "from runtime.sharded import killed; killed()"], whole=True)
    try:
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [1, -9]
    assert "worker 1 is gone: it ended without a word" in said[0]


@pytest.mark.parametrize(
    "method", ["pb", "pipedream", "pipedream-2bw", "spectrain", "pipemare", "overlapping(delay=1)", "paci(every=2)"]
)
def test_methods_with_several_versions_of_weights_are_refused(method):
    with pytest.raises(stretto.UsageError, match=r"works with several versions of the weights.*sync='all-reduce'"):
        replicated.build(method, TWO, sync="fully-shard")


def test_masters_are_refused():
    with pytest.raises(stretto.UsageError, match="use precision='bf16-autocast', or sync='all-reduce'"):
        replicated.build("1f1b", TWO, sync="fully-shard", precision="bf16")


def test_weights_of_two_stages_are_refused():
    stages = replicated.stages(3)
    stages[1][0].weight = stages[0][0].weight
    with pytest.raises(stretto.UsageError, match=r"stages 0 and 1 share.*fully-shard.*use sync='all-reduce'"):
        stretto.Trainer(stages, torch.nn.functional.mse_loss, torch.optim.Adam, "1f1b", mesh=TWO, sync="fully-shard")
