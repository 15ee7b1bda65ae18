"""Among the checkpoints of a run: the newest whole one is found, older ones are removed, none is ever lost."""

import shutil

import pytest

from checkpoint.test_folder import entered, names, save
from stretto.checkpoint import begin, newest, prune
from stretto.errors import UsageError


@pytest.fixture
def run(tmp_path):
    for n in (2, 9, 10):
        save(tmp_path / f"step-{n}", n, count=1)
    return tmp_path


def cut(path):
    file = path / "stage-0" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:50])


def flip(path):
    file = path / "stage-0" / "state.json"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def test_the_newest_is_found_by_number(run):
    assert newest(run) == (run / "step-10", [])
    assert newest(str(run)) == (run / "step-10", [])


def test_nothing_to_find(tmp_path):
    assert newest(tmp_path / "none") == (None, [])
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "step-old").mkdir()
    assert newest(tmp_path) == (None, [])
    prune(tmp_path)
    assert names(tmp_path) == ["notes.txt", "step-old"]


@pytest.mark.parametrize(("spoil", "complaint"), [
    (cut, r"step-10.stage-0.__0_0.distcp is damaged: it has 50 bytes and had \d+"),
    (flip, r"step-10.stage-0.state.json is damaged: its CRC-32 is \w+ and was \w+"),
    (lambda path: (path / "manifest.json").unlink(), r"step-10 is not a whole checkpoint: manifest.json is missing"),
    (lambda path: shutil.rmtree(path / "stage-0"), r"step-10.stage-0.*is missing"),
    (lambda path: (shutil.rmtree(path), path.write_text("old")), "step-10 is not a checkpoint but a file"),
])  # fmt: skip
def test_a_damaged_one_is_named_and_the_one_before_used(spoil, complaint, run):
    spoil(run / "step-10")
    (found, complaints) = newest(run)
    assert found == run / "step-9"
    assert len(complaints) == 1
    with pytest.raises(UsageError, match=complaint):
        raise UsageError(complaints[0])


def test_a_half_written_one_is_named(run):
    begin(run / "step-11")
    assert newest(run) == (run / "step-10", [f"{run / '.step-11.partial'} was never finished"])


def test_all_damaged(run):
    for n in (2, 9, 10):
        cut(run / f"step-{n}")
    found, complaints = newest(run)
    assert found is None
    assert [f"step-{n}" in text for n, text in zip((10, 9, 2), complaints, strict=True)] == [True] * 3


def test_one_that_was_being_replaced_is_found(run):
    (run / "step-10").rename(run / ".step-10.former")
    assert newest(run) == (run / "step-10", [])
    assert entered(run / "step-10") == 10


def test_prune_keeps_the_newest(run):
    prune(run)
    assert names(run) == ["step-10", "step-9"]
    prune(run, keep=1)
    assert names(run) == ["step-10"]
    prune(run, keep=1)
    assert names(run) == ["step-10"]


def test_prune_does_not_count_what_is_damaged(run):
    cut(run / "step-10")
    prune(run, keep=1)
    assert names(run) == ["step-10", "step-9"]
    assert entered(run / "step-9") == 9


def test_prune_clears_what_was_left(run):
    begin(run / "step-11")
    (run / "step-2").rename(run / ".step-2.removed")
    (run / "step-9").rename(run / ".step-9.former")
    prune(run, keep=1)
    assert names(run) == ["step-10"]


def test_none_can_be_pruned_away(run):
    with pytest.raises(UsageError, match="keep=0: at least one"):
        prune(run, keep=0)
