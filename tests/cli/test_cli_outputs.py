"""What cannot be written, or does not fit into memory, is said before anything is computed."""

import errno

import pytest
import torch

import stretto
from stretto import models
from stretto.cli import main, output
from stretto.cli.output import check_file, check_folder
from stretto.errors import UsageError
from stretto.nn import memory_limit

TRAIN = "train --model-options.width 8 --steps 2 --quiet"
FILES = {
    f"{TRAIN} --trace /": "cannot write to /: it is a folder",
    f"{TRAIN} --trace .": "cannot write to .: it is a folder",
    f"{TRAIN} --trace file/trace": "file is a file",
    f"{TRAIN} --trace /proc/trace": "cannot write to /proc/trace",
    f"{TRAIN} --out /": "cannot write to /: it has no name",
    f"{TRAIN} --out ..": "cannot write to ..: it has no name",
    f"{TRAIN} --out file/run": "file is a file",
    f"{TRAIN} --out file": "is a file",
    "compare --steps 2 --out file/x": "file is a file",
    "show 1f1b --svg /": "cannot write to /: it is a folder",
    "show 1f1b --csv folder": "cannot write to folder: it is a folder",
    "simulate --method 1f1b --trace folder": "cannot write to folder: it is a folder",
    "simulate --method 1f1b --svg file/x": "file is a file",
    "plan --model mlp --workers 2 --cluster 128-nodes-of-8-h100 --out folder": "cannot write to folder: it is a folder",
    "calibrate --quick --out folder": "cannot write to folder: it is a folder",
    "calibrate --quick --out " + "x" * 300 + "/a": "name too long",
}


@pytest.mark.parametrize("words", FILES)
def test_outputs_are_looked_at_first(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    for each in ("prepare", "resolve"):
        monkeypatch.setattr(f"stretto.study.prepare.{each}", None)
    assert main(words.split()) == 2
    assert FILES[words].lower() in capsys.readouterr().err.lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_what_may_not_be_written(tmp_path, monkeypatch):
    """Root may write everywhere: so the system's answers are replaced."""

    def refused(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(output.os, "access", lambda path, mode: False)
    monkeypatch.setattr(output.tempfile, "TemporaryFile", refused)
    (tmp_path / "there").touch()
    with pytest.raises(UsageError, match="may not be written: choose another file"):
        check_file(tmp_path / "there")
    for check, other in ((check_file, "file"), (check_folder, "--out")):
        with pytest.raises(UsageError, match=f"Permission denied: choose another {other}"):
            check(tmp_path / "a" / "b" / "new")


def test_what_can_be_written(tmp_path):
    for name in ("new", "a/b/new"):
        check_file(tmp_path / name)
        check_folder(tmp_path / name)
    check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_a_folder_without_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN.split(), "--out", "."]) == 2
    assert "--out . has no name of its own" in capsys.readouterr().err


def test_more_replicas_than_examples(capsys, tmp_path):
    out = str(tmp_path / "run")
    assert main([*TRAIN.split(), "--data-parallel", "100000", "--out", out]) == 2
    assert "batch_size=32 for data_parallel=100000: each replica needs an example" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_more_replicas_than_memory(monkeypatch):
    monkeypatch.setattr(memory_limit, "available", lambda: 1e6)
    stages = [torch.nn.Linear(100, 100), torch.nn.Linear(100, 10)]

    def trained(replicas):
        return stretto.Trainer(
            stages,
            loss=torch.nn.functional.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            mesh=stretto.Mesh(data=replicas),
        )

    trained(2)
    with pytest.raises(UsageError, match=r"data=100000: 99999 copies of the stages .*, and 0\.0 GiB are free"):
        trained(100000)


@pytest.mark.parametrize("width", [100_000_000, 10**12])
def test_a_network_that_does_not_fit(width, capsys, tmp_path):
    words = ["train", "--model-options.width", str(width), "--steps", "2", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"width {width}" in err
    assert "GiB are free here; choose smaller numbers" in err


def test_what_is_there_is_counted(monkeypatch):
    digits = stretto.data.load("digits")
    found = models.build("mlp", digits, width=64)
    size = sum(each.numel() * 4 for layer in found.layers for each in layer.parameters())
    monkeypatch.setattr(memory_limit, "available", lambda: size)
    models.build("mlp", digits, width=64)
    monkeypatch.setattr(memory_limit, "available", lambda: size - 1)
    with pytest.raises(UsageError, match="model 'mlp'"):
        models.build("mlp", digits, width=64)
    monkeypatch.undo()
    assert 1e6 < memory_limit.available() < 1e15
