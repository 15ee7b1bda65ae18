"""What earlier versions wrote is read: checkpoints go on to the same bit, folders of runs are shown, plans are run."""

import json
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import stretto
import stretto.cli
from recorded import compare
from recorded.formats import CHECKPOINTS, SERVED, gone_on, resumed
from recorded.training import train

ARCHIVES = sorted((Path(__file__).parent / "formats").glob("*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def left(request, tmp_path_factory):
    """What one version left, in a folder."""
    folder = tmp_path_factory.mktemp("left")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    return folder


def same(found, wanted, left):
    """To the last bit on the machine that made them, closely on others."""
    assert found.keys() == wanted.keys()
    here = json.loads((left / "made-by.json").read_text())["machine"] == compare.machine()
    for name, value in wanted.items():
        if here:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)  # bfloat16, too


def test_two_formats_of_checkpoints_are_kept():
    assert [path.name for path in ARCHIVES] == ["format-2.tar.xz", "format-3.tar.xz"]


def test_checkpoints_go_on(left):
    names = {path.stem for path in (left / "checkpoints").iterdir()}
    assert names in ({*CHECKPOINTS}, {*CHECKPOINTS} - {"merging"})  # format 2 had one replica's state only
    for name in names:
        checkpoint = left / "checkpoints" / name
        same(gone_on(CHECKPOINTS[name], checkpoint), load_file(f"{checkpoint}.safetensors"), left)


def test_an_interrupted_run_goes_on(left, tmp_path, capsys):
    same(resumed(left / "interrupted", tmp_path), load_file(left / "interrupted.safetensors"), left)
    assert "checkpoint" not in capsys.readouterr().err  # none was damaged


def test_a_study_is_reported_again(left, capsys):
    assert stretto.cli.main(["report", str(left / "compare"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["method"] for run in told["runs"]] == ["backprop", "pb-lwp-sc"]
    assert all(run["total_flops"] > 0 and 0 < run["test_loss"] < 10 for run in told["runs"])
    assert "pb-lwp-sc" in Path(told["report"]).read_text()


def test_runs_are_inspected(left, capsys):
    for folder in (left / "compare", left / "train"):
        assert stretto.cli.main(["inspect", str(folder), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_a_recorded_run_is_laid_over_its_simulation(left, tmp_path, capsys):
    out = tmp_path / "both.pftrace"
    assert stretto.cli.main(["simulate", "--overlay", str(left / "train"), "--trace", str(out)]) == 0
    assert out.stat().st_size > 1000


def test_a_plan_is_shown(left, capsys):
    assert stretto.cli.main(["show", "--plan", str(left / "plan.toml")]) == 0
    assert "worker 0" in capsys.readouterr().out


def test_an_order_of_updates_is_kept(left, tmp_path):
    order = train(SERVED, str(tmp_path), str(left / "order.json"))[1].order()
    order.write(tmp_path / "order.json")
    assert json.loads((tmp_path / "order.json").read_text()) == json.loads((left / "order.json").read_text())
