"""Law 6 in a pipeline: stages that several processes share train as one device does, and as their emulation."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch

import stretto
from runtime import inside
from runtime.processes import launch, run
from runtime.scripts import same
from stretto import Mesh

HYBRID = Mesh(data=2, tensor=2)  # on eight processes a pipeline of two
HEIGHT, WIDTH, TENSOR = Mesh(space=(2, 1)), Mesh(space=(1, 2)), Mesh(tensor=2)
BOTH, BOTH_WIDE = Mesh(tensor=2, space=(2, 1)), Mesh(tensor=2, space=(1, 2))  # a pipeline of one on four processes
EIGHT = [
    ("transformer", "1f1b", HYBRID, {"clip": 0.1}),
    ("transformer", "pb", HYBRID, {}),
    ("transformer", "pipedream", HYBRID, {"clip": 0.1, "adam": True}),
    ("convolutions", "1f1b", Mesh(data=2, space=(2, 1)), {"sync": "local-sgd(every=2)"}),
    ("residual", "1f1b", BOTH, {"clip": 0.1}),
    ("convolutions", "pipedream", BOTH_WIDE, {"adam": True}),
    ("residual", "backprop", Mesh(data=2, tensor=2, space=(1, 2)), {"sync": "all-reduce"}),  # norms of each replica
    ("convolutions", "backprop", Mesh(tensor=2, space=(2, 2)), {}),
]  # fmt: skip
FEW = [  # six steps are for others
    ("convolutions", "1f1b(microbatches=2)", HEIGHT, {"clip": 0.1, "steps": 2}),
    ("transformer", "pb-lwp-sc", TENSOR, {"steps": 3}),
    ("residual", "backprop", BOTH, {"clip": 0.1, "steps": 2}),
]
FOUR = [
    ("convolutions", "1f1b", HEIGHT, {"clip": 0.1}),
    ("convolutions", "pb", HEIGHT, {}),
    ("convolutions", "greedy", WIDTH, {}),
    ("convolutions", "overlapping", HEIGHT, {"adam": True}),
    ("pixels", "pipedream", WIDTH, {}),
    ("convolutions", "greedy", TENSOR, {"clip": 0.1}),
    ("transformer", "pb-lwp-sc", TENSOR, {}),
    ("transformer", "zb-h1", TENSOR, {}),
    ("transformer", "gpipe(recompute=True)", TENSOR, {}),
    ("residual", "backprop", BOTH, {"clip": 0.1}),
    ("pixels", "backprop", BOTH_WIDE, {}),
    ("convolutions", "greedy", BOTH_WIDE, {"adam": True}),
    ("transformer", "1f1b", TENSOR, {"recompute": "full"}),
]  # fmt: skip


def near(told, losses, weights, *evaluated):
    assert told[0] == pytest.approx(losses, abs=1e-9)
    assert told[1].keys() == weights.keys()
    assert all(torch.allclose(told[1][key], weights[key], rtol=0, atol=1e-9) for key in weights)
    for value in evaluated:
        assert told[2] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("processes", "runs"),
    [(4, FEW), pytest.param(4, FOUR, marks=pytest.mark.slow), pytest.param(8, EIGHT, marks=pytest.mark.slow)],
    ids=["few", "four", "eight"],
)
def test_shared_stages(processes, runs):
    """Against their emulation, and where replicas train alike against one device."""
    told = launch(processes, "runtime.inside:train_all", runs, timeout=400)
    for number, (network, method, mesh, options) in enumerate(runs):
        emulated = inside.train(network, method, mesh, workers=2, **options)
        near(told[0][number], *emulated)
        if "sync" not in options:
            near(told[0][number], *inside.train(network, method, workers=2, **options))
        if mesh in (BOTH, BOTH_WIDE) and method == "backprop":
            near(told[0][number], *inside.plain(network, **options))
        for rank in range(1, processes):
            assert told[rank][number][::2] == told[0][number][::2]
            assert told[rank][number][1] is None


def test_checkpoints_and_tied_weights(tmp_path):
    told, losses = launch(2, "runtime.inside:two", str(tmp_path))[0]
    assert losses == pytest.approx(inside.tied(), abs=1e-12)
    for network, (first, again) in told.items():
        assert same(first, again), network
    parts = {path.parent.name: json.loads(path.read_text())["parts"] for path in tmp_path.glob("*/manifest.json")}
    assert parts == {"transformer": 2, "convolutions": 1}
    alone = inside.resume("convolutions", "backprop", None, tmp_path / "convolutions")
    assert all(torch.allclose(alone[key], told["convolutions"][0][key], rtol=0, atol=1e-12) for key in alone)
    with pytest.raises(stretto.UsageError, match=r"weights 2 processes share, here 1 do: .*Mesh\(tensor=2\)"):
        inside.resume("transformer", "backprop", None, tmp_path / "transformer")


@pytest.mark.slow
def test_checkpoints_of_weights_and_images_cut_at_once(tmp_path):
    """They go on with the same parts of the weights, however images are cut; whole weights fit the whole network."""
    folder = str(tmp_path / "saved")
    saved = launch(4, "runtime.inside:save_cut_slabs", folder)[0]
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["parts"] == 2
    assert same(saved, launch(4, "runtime.inside:resume_cut", folder, (2, 1))[0])
    for processes, space in ((4, (1, 2)), (2, (1, 1))):
        others = launch(processes, "runtime.inside:resume_cut", folder, space)[0]
        assert all(torch.allclose(saved[key], others[key], rtol=0, atol=1e-12) for key in saved), space
    torch.nn.Sequential(*inside.residual()).double().load_state_dict(saved)
    with pytest.raises(stretto.UsageError, match=r"weights 2 processes share, here 1 do: .*Mesh\(tensor=2\)"):
        inside.resume("residual", "backprop", None, folder)


SCRIPT = Path(__file__).with_name("faulty_inside.py")


@pytest.mark.slow
def test_a_process_that_dies_is_named():
    statuses, said = run(2, [sys.executable, str(SCRIPT)], whole=True)
    assert statuses == [1, -signal.SIGKILL]
    assert "worker 1 is gone" in said[0], said[0]
