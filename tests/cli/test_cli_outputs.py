"""What cannot be written, or does not fit into memory, is said before anything is computed."""

import errno
import shutil

import pytest
import torch

import stretto
from stretto import models
from stretto.cli import main
from stretto.errors import UsageError
from stretto.nn import memory_limit
from stretto.study import store
from stretto.system import destinations
from stretto.system.destinations import check_file, check_folder

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
    f"{TRAIN} --trace /dev/full": "cannot write to /dev/full: no space left",
    f"{TRAIN} --out loop": "cannot write to loop: too many levels of symbolic links",
    f"{TRAIN} --trace loop": "cannot write to loop: too many levels of symbolic links",
    "compare --steps 2 --out loop": "cannot write to loop: too many levels of symbolic links",
    "plan --cluster 8-a100 --export torch --out b.toml": "cannot write to b.csv: it is a folder",
    "plan --cluster 8-a100 --scale 1,2 --out b.toml": "cannot write to b.html: it is a folder",
}


@pytest.mark.parametrize("words", FILES)
def test_outputs_are_looked_at_first(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    for name in ("folder", "b.csv", "b.html"):
        (tmp_path / name).mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for each in ("prepare", "resolve"):
        monkeypatch.setattr(f"stretto.study.prepare.{each}", None)
    assert main(words.split()) == 2
    assert FILES[words].lower() in capsys.readouterr().err.lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.csv", "b.html", "file", "folder", "loop"]
    assert (tmp_path / "file").read_text() == "kept"


def test_what_may_not_be_written(tmp_path, monkeypatch):
    """Root may write everywhere: so the system's answers are replaced."""

    def refused(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(destinations.os, "access", lambda path, mode: False)
    monkeypatch.setattr(destinations.tempfile, "TemporaryFile", refused)
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


@pytest.mark.parametrize("log", ["csv(folder='file')", "csv(folder=file)", "mlflow(uri='sqlite:///file/x')"])
def test_what_trackers_write_is_looked_at_first(log, capsys, tmp_path, monkeypatch):
    if log.startswith("mlflow"):
        pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr("stretto.study.training_run.make_run", None)
    assert main([*TRAIN.split(), "--log", log]) == 2
    assert "file is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


LINKS = {"empty": "folder", "dangling": "deep/new"}


@pytest.mark.parametrize("name", LINKS)
def test_a_run_is_written_to_where_a_link_leads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / name).symlink_to(LINKS[name])
    made = tiny_run(out=name)
    assert (tmp_path / name).is_symlink()
    assert (tmp_path / LINKS[name] / "run.json").is_file()
    assert made.weights().keys() == {"weight", "bias"}
    assert tiny_run(out=name)["train_loss"] == made["train_loss"]  # read, not made again
    assert not list(tmp_path.rglob(".*"))


def test_a_study_is_written_to_where_a_link_leads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("deep/new")
    few = {"methods": "backprop", "lr": 0.1, "batch_size": 3, "steps": 2, "seeds": 1, "jobs": 1, "quiet": True}
    made = stretto.compare(*TINY, loss="mse_loss", out="link", **few)
    assert len(made.runs) == 1
    assert (tmp_path / "deep" / "new" / "study.json").is_file()


x = torch.arange(12.0).reshape(6, 2) / 12
TINY = (torch.nn.Linear(2, 2), [(x, x), (x, x)])


def tiny_run(**options):
    return stretto.train(*TINY, lr=0.1, batch_size=3, steps=2, loss="mse_loss", quiet=True, **options)


OUTS = {
    "file": "is there already and holds no run", "to-file": "is there already and holds no run",
    "file/run": "file is a file", "loop": "symbolic links", "x" * 250: "too long",
    "beside": ".beside.checkpoints is a file", "mounted": "something is mounted there",
}  # fmt: skip


@pytest.mark.parametrize("out", OUTS)
def test_a_run_that_could_not_be_kept_is_not_begun(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("file", ".beside.checkpoints"):
        (tmp_path / name).write_text("kept")
    for name, target in {"to-file": "file", "loop": "loop"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(destinations.os.path, "ismount", lambda path: path.name == "mounted")
    monkeypatch.setattr("stretto.study.python_calls.make_run", None)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UsageError) as raised:
        tiny_run(out=out)
    assert OUTS[out].lower() in str(raised.value).lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_run_without_room_is_not_begun(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("stretto.study.store.shutil.disk_usage", lambda _: usage._replace(free=2**16 + 23))
    monkeypatch.setattr("stretto.study.python_calls.make_run", None)
    with pytest.raises(stretto.StrettoError, match=r"run has 64\.0 KiB free, a run needs 64\.0 KiB: free"):  # 24 bytes
        tiny_run(out=tmp_path / "run")


def test_a_run_whose_folder_is_taken_while_it_trains_is_kept(tmp_path, monkeypatch):
    def taken(*_):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(store.Path, "rename", taken)
    with pytest.raises(UsageError, match=r"resource busy.*the whole run is in .*\.run\.partial, rename that"):
        tiny_run(out=tmp_path / "run")
    assert {"run.json", "events.jsonl", "model.safetensors"} <= {
        path.name for path in (tmp_path / ".run.partial").iterdir()
    }


def test_links_among_the_files_of_an_interrupted_run_are_not_followed(tmp_path):
    """They may be somebody else's, as a folder that was unpacked."""
    (tmp_path / "mine").write_text("kept")
    (tmp_path / ".run.partial").mkdir()
    for name in ("events.jsonl", "run.json", "model.safetensors"):
        (tmp_path / ".run.partial" / name).symlink_to(tmp_path / "mine")
    tiny_run(out=tmp_path / "run")
    assert (tmp_path / "mine").read_text() == "kept"
    assert not (tmp_path / "run" / "events.jsonl").is_symlink()
    (tmp_path / "away").mkdir()
    (tmp_path / ".other.partial").symlink_to(tmp_path / "away")
    tiny_run(out=tmp_path / "other")
    assert not (tmp_path / "other").is_symlink()
    assert not list((tmp_path / "away").iterdir())


def test_a_calibration_is_not_begun_where_its_file_cannot_be(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").mkdir()
    monkeypatch.setattr("stretto.cli.calibrate.machine", None)
    assert main(["calibrate", "--quick"]) == 2
    assert "cannot write to cluster.toml: it is a folder" in capsys.readouterr().err


def test_all_reduces_are_not_measured_where_they_cannot_be_kept(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr("stretto.cli.calibrate.all_reduces", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["calibrate", "--collectives", "--workers", "2"]) == 2
    assert "file is a file: choose another place: give --out FILE" in capsys.readouterr().err
    monkeypatch.setattr("stretto.collectives.stored_calibration.user_cache", lambda: None)
    assert main(["calibrate", "--collectives", "--workers", "2"]) == 2
    assert "has no home folder: give --out FILE" in capsys.readouterr().err


def test_a_run_in_a_folder_without_a_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*TRAIN.split(), "--out", "."]) == 2
    assert "cannot write to .: it has no name" in capsys.readouterr().err


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
