"""Names that become paths lead nowhere else: in study files, runs, storages and checkpoints of strangers."""

import json
import pickle
import zlib
from pathlib import Path

import pytest
import torch

from stretto.cli import main
from stretto.errors import UsageError
from stretto.study.store import write_run
from stretto.system.path_names import in_path

EVIL = [
    "../evil",
    "../../evil",
    "/evil",
    "a/b",
    "..",
    ".",
    "",
    " ",
    "a\\b",
    "..\\evil",
    "C:evil",
    "a\0b",
    "a\nb",
    ".hidden",
    "x" * 300,
]


@pytest.mark.parametrize("name", EVIL)
def test_names_that_lead_elsewhere(name):
    with pytest.raises(UsageError, match="the part"):
        in_path(name, "the part")


@pytest.mark.parametrize("name", ["a", "narrow", "a b", "a..b", "x-lr0.1-b32-s0", "größe", "-", "a.toml", "x" * 200])
def test_names_that_stay(name, tmp_path):
    assert in_path(name, "it") == name
    (tmp_path / name).touch()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_names_that_are_none():
    for name in (None, 5, ["a"], b"a", Path("a")):
        with pytest.raises(UsageError, match="write a text"):
            in_path(name, "it")
    with pytest.raises(UsageError, match="begin it with a letter"):
        in_path("..", "it", hidden=True)
    assert in_path(".metadata", "it", hidden=True) == ".metadata"


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/../b", "..", ".git", "a\\\\b"])
def test_a_part_of_a_study_stays_in_its_folder(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(
        f'title = "t"\nmethods = ["greedy"]\nsteps = 2\nlr = [0.1]\n[small]\n[parts."{name}"]\nbatch_size = [8]\n'
    )
    for more in (["--out", "a/b/c"], [], ["--dry-run"]):
        assert main(["compare", "s.toml", *more]) == 2
        assert "s.toml: the name of a part is" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["s.toml"]


def test_a_storage_gives_no_other_files(tmp_path):
    good = {"run.json": "{}", "events.jsonl": ""}
    write_run(tmp_path / "runs" / "one", good)
    for files in ({**good, "../../evil": "x"}, {"run.json": "{}"}, {**good, "run.json": 5}, {"/tmp/evil": ""}):
        with pytest.raises(UsageError, match=r"a run has run\.json and events\.jsonl, as texts"):
            write_run(tmp_path / "runs" / "two", files)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "runs", "runs/one", "runs/one/events.jsonl", "runs/one/run.json"
    ]  # fmt: skip


@pytest.mark.usefixtures("plain_pages")
def test_a_study_on_the_disk_whose_runs_are_elsewhere(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["compare", "--methods", "greedy", "--steps", "2", "--seeds", "1", "--lr", "0.1", "--quiet"]
    assert main([*words, "--model-options.width", "8", "--jobs", "1", "--out", "s"]) == 0
    file = tmp_path / "s" / "study.json"
    content = json.loads(file.read_text())
    content["settings"]["lr"] = ["../../../elsewhere"]
    file.write_text(json.dumps(content))
    capsys.readouterr()
    assert main(["report", "s"]) == 2
    assert "study.json: lr[0] = '../../../elsewhere': a number belongs here" in capsys.readouterr().err


@pytest.fixture
def checkpoint(tmp_path):
    import stretto

    stages = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)]
    trainer = stretto.Trainer(
        stages, loss=torch.nn.functional.cross_entropy, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    trainer.save(tmp_path / "saved")
    return trainer, tmp_path / "saved"


def sealed(content):
    """A manifest with a sum that is right, as a stranger would make it."""
    content.pop("crc32")
    rest = json.dumps(content, sort_keys=True).encode()
    return json.dumps({**content, "crc32": f"{zlib.crc32(rest):08x}"})


def test_files_that_a_manifest_names_are_in_its_folder(checkpoint):
    trainer, path = checkpoint
    content = json.loads((path / "manifest.json").read_text())
    content["stages"][0]["../../elsewhere"] = [0, "00000000"]
    (path / "manifest.json").write_text(sealed(content))
    with pytest.raises(UsageError, match=r"the name of a file is '../../elsewhere'"):
        trainer.load(path)


def test_files_that_the_metadata_names_are_in_its_folder(checkpoint):
    trainer, path = checkpoint
    file = path / "stage-0" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../stage-0/__0_0.distcp"
    file.write_bytes(pickle.dumps(metadata))
    content = json.loads((path / "manifest.json").read_text())
    content["stages"][0][".metadata"] = [file.stat().st_size, f"{zlib.crc32(file.read_bytes()):08x}"]
    (path / "manifest.json").write_text(sealed(content))
    with pytest.raises(UsageError, match="the name of a file with tensors is"):
        trainer.load(path)
