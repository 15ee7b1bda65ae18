"""A checkpoint is whole or not there; what is damaged is named; what cannot be written leaves what was."""

import errno
import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.testing._internal.distributed.fake_pg
from hypothesis import given, settings

from checkpoint.states import assert_same, states
from pairwise import in_turn
from stretto import checkpoint
from stretto.checkpoint import Manifest, begin, discard, finish, read_manifest, read_stage, verify, write, write_stage
from stretto.errors import UsageError


def manifest(**given):
    return Manifest(**{"method": "greedy", "seed": 3, "precision": None, "entered": 7, **given})


def state(n, size=40):
    return {"module": {"w": torch.full((size,), float(n))}, "optimizer": {"state": {0: {"step": torch.tensor(n)}}}}


def save(path, n=1, count=2):
    write(path, [state(n)] * count, manifest(entered=n))


def entered(path):
    """Which of several checkpoints is there, read through and through."""
    n = read_manifest(path).entered
    verify(path)
    for index in range(len(read_manifest(path).stages)):
        assert_same(read_stage(path, index), state(n))
    return n


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# -- what comes back --------------------------------------------------------------------------------------------------

SOME = settings(max_examples=settings().max_examples // 2)  # of those of other laws: each writes a folder


@SOME
@given(states)
def test_a_stage_comes_back_from_disk(tmp_path_factory, state):
    path = tmp_path_factory.getbasetemp() / "run"
    write(path, [state, {}], manifest())
    assert_same(read_stage(path, 0), state)
    assert_same(read_stage(str(path), 1), {})
    verify(path)


def test_the_manifest_comes_back(tmp_path):
    extra = {"data": {"epoch": 3, "order": (1, 2)}, "random": bytes(range(256)), 5: None}
    written = manifest(losses={8: [0.1, float("inf")], 9: [1 / 3]}, extra=extra, precision="bf16")
    write(tmp_path / "run", [state(1)], written)
    found = read_manifest(tmp_path / "run")
    assert (found.method, found.seed, found.precision, found.entered) == ("greedy", 3, "bf16", 7)
    assert found.losses == {8: [0.1, float("inf")], 9: [1 / 3]}
    assert found.torch == torch.__version__
    assert_same(found.extra, extra)
    assert [list(digest) for digest in found.stages] == [[".metadata", "__0_0.distcp", "state.json"]]
    plain = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert plain["format"] == 3
    assert plain["num_stages"] == 1


def test_extra_holds_no_tensor(tmp_path):
    with pytest.raises(UsageError, match=r"cannot hold the tensor data\.order"):
        write(tmp_path / "run", [state(1)], manifest(extra={"data": {"order": torch.ones(2)}}))
    assert names(tmp_path) == []


def test_stages_are_written_and_read_in_any_order(tmp_path):
    """As several workers do it."""
    partial = begin(tmp_path / "run")
    digests = {index: write_stage(partial, index, state(index)) for index in (2, 0, 1)}
    as_sent = json.loads(json.dumps([digests[index] for index in range(3)]))  # between workers
    assert names(tmp_path) == [".run.partial"]
    finish(partial, tmp_path / "run", manifest(stages=as_sent))
    assert names(tmp_path) == ["run"]
    for index in (1, 2, 0):
        assert_same(read_stage(tmp_path / "run", index), state(index))
    with pytest.raises(UsageError, match="holds 3 stages: it has no stage 3"):
        read_stage(tmp_path / "run", 3)


def test_a_worker_needs_no_other(tmp_path):
    """In a job of four whose other three do nothing: what it did together would write no metadata, or wait for ever."""
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=2, world_size=4)
    try:
        save(tmp_path / "run")
        assert entered(tmp_path / "run") == 1
    finally:
        torch.distributed.destroy_process_group()
    assert entered(tmp_path / "run") == 1


def test_torch_itself_can_read_a_stage(tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(tmp_path / "run", 4)
    dcp_to_torch_save(tmp_path / "run" / "stage-1", tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert_same(found, {"module.w": torch.full((40,), 4.0), "optimizer.state.0.step": torch.tensor(4)})


def test_a_save_replaces_the_one_before(tmp_path):
    (tmp_path / "run").mkdir()  # made by the script, empty
    for n in range(3):
        save(tmp_path / "run", n, count=3 - n)
        assert entered(tmp_path / "run") == n
        assert names(tmp_path) == ["run"]


def test_folders_are_made_and_links_followed(tmp_path):
    save(tmp_path / "a" / "b" / "run", 1)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "run")
    save(tmp_path / "link", 2)
    assert entered(tmp_path / "a" / "b" / "run") == entered(tmp_path / "link") == 2
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["a", "link"]


# -- replicas ---------------------------------------------------------------------------------------------------------


def replica(n, mean, steps=1):
    """A stage's state, of which `mean` is a replica's own, and the count if it is not 1."""
    module = {"w": torch.full((5000,), float(n)), "mean": torch.full((3,), mean)}
    return {"module": module, "steps": steps}


def save_replicas(path):
    """Stage 0: the second replica has another mean, the third is as the first; stage 1: the third has another count."""
    states = [
        [replica(1, 0.0), replica(2, 0.0)],
        [replica(1, 1.0), replica(2, 0.0)],
        [replica(1, 0.0), replica(2, 0.0, 5)],
    ]
    write(path, states[0], manifest(replicas=3, sync="all-reduce"), states[1:])
    return states


def test_replicas_share_what_is_the_same(tmp_path):
    states = save_replicas(tmp_path / "run")
    for number, own in enumerate(states):
        for index, wanted in enumerate(own):
            assert_same(read_stage(tmp_path / "run", index, number), wanted)
    verify(tmp_path / "run")
    assert names(tmp_path / "run" / "stage-0") == [".metadata", "__0_0.distcp", "replica-1", "state.json"]
    assert names(tmp_path / "run" / "stage-1") == [".metadata", "__0_0.distcp", "replica-2", "state.json"]
    whole, mean = (tmp_path / "run" / "stage-0" / own / "__0_0.distcp" for own in (".", "replica-1"))
    assert whole.stat().st_size > 20_000 > 4_000 > mean.stat().st_size > 0  # three numbers in an archive
    assert (tmp_path / "run" / "stage-1" / "replica-2" / "__0_0.distcp").stat().st_size == 0  # no tensor
    with pytest.raises(UsageError, match="holds 3 replicas of each stage: it has no replica 3"):
        read_stage(tmp_path / "run", 0, 3)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_replicas_write_in_any_order(order, tmp_path):
    """As several processes do it, which know the first one's contents by hashes only."""
    states = [replica(1, float(number)) for number in range(3)]
    partial = begin(tmp_path / "run")
    first = json.loads(json.dumps(checkpoint.contents(0, states[0])))
    digest = {}
    for number in order:
        digest |= write_stage(partial, 0, states[number], replica=number, first=first if number else None)
    finish(partial, tmp_path / "run", manifest(stages=[digest], replicas=3, sync="all-reduce"))
    for number, state in enumerate(states):
        assert_same(read_stage(tmp_path / "run", 0, number), state)


@SOME
@given(states, states)
def test_any_two_replicas_come_back(tmp_path_factory, one, other):
    path = tmp_path_factory.getbasetemp() / "run"
    write(path, [one], manifest(replicas=3, sync="diloco"), [[other], [one]])
    for number, state in enumerate((one, other, one)):
        assert_same(read_stage(path, 0, number), state)


def test_damage_to_what_replicas_share_or_have_for_themselves_is_named(tmp_path):
    save_replicas(tmp_path / "run")
    for file in files(tmp_path / "run" / "stage-0"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UsageError, match=f"{file} is damaged"):
            verify(tmp_path / "run")
        own = file.parent.name == "replica-1"
        if own or file.suffix == ".distcp":
            with pytest.raises(UsageError, match=f"{file} is damaged"):
                read_stage(tmp_path / "run", 0, 1)
        if own:
            assert_same(read_stage(tmp_path / "run", 0, 0), replica(1, 0.0))
        file.write_bytes(content)
    verify(tmp_path / "run")


# -- what is damaged --------------------------------------------------------------------------------------------------


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("spoil", ["cut", "empty", "longer", "missing", "flipped", "unreadable"])
def test_damage_to_any_file_is_named(spoil, tmp_path):
    save(tmp_path / "whole")
    draw = random.Random(1)
    for number in range(len(files(tmp_path / "whole"))):
        path = shutil.copytree(tmp_path / "whole", tmp_path / f"copy-{number}")
        file = files(path)[number]
        content = bytearray(file.read_bytes())
        if spoil == "missing":
            file.unlink()
        elif spoil == "unreadable":
            file.unlink()
            file.mkdir()
        elif spoil == "flipped":
            position = draw.randrange(len(content))
            content[position] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        else:
            file.write_bytes(
                {"cut": content[: draw.randrange(1, len(content))], "empty": b"", "longer": content * 2}[spoil]
            )
        with pytest.raises(UsageError, match=f"{file.name}.*(missing|damaged|cannot be read)") as error:
            verify(path)
        assert str(path) in str(error.value)
        part = file.parent.name
        for index in (0, 1):
            if part in (f"stage-{index}", path.name):
                with pytest.raises(UsageError, match=file.name):
                    read_stage(path, index)
            else:
                assert_same(read_stage(path, index), state(1))


@pytest.mark.parametrize("flips", [25, pytest.param(100, marks=pytest.mark.slow)])
def test_no_bit_of_a_file_can_change_unnoticed(flips, tmp_path):
    """In the manifest, changes that mean nothing (1e-05 and 1E-05) may pass."""
    save(tmp_path / "run")
    draw = random.Random(2)
    wanted = read_manifest(tmp_path / "run")
    for file in files(tmp_path / "run"):
        content = file.read_bytes()
        for _ in range(flips):
            flipped = bytearray(content)
            flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(flipped)
            try:
                verify(tmp_path / "run")
            except UsageError:
                continue
            assert file.name == "manifest.json"
            assert read_manifest(tmp_path / "run") == wanted
        file.write_bytes(content)
    assert entered(tmp_path / "run") == 1


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.manifest, "FORMAT", 4)
    write(tmp_path / "run", [state(1)], manifest(stretto="9.1"))
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"json is of format 4, written by version 9.1.*reads formats 2 and 3"):
        read_manifest(tmp_path / "run")


def test_reading_runs_no_code_from_the_file(tmp_path):
    """`.metadata` is a pickle: even a forged one, with the right digest, may name nothing but its own parts."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    partial = begin(tmp_path / "run")
    write_stage(partial, 0, state(1))
    (partial / "stage-0" / ".metadata").write_bytes(pickle.dumps(Evil()))
    digest = checkpoint.manifest.digest_of(partial / "stage-0")
    finish(partial, tmp_path / "run", manifest(stages=[digest]))
    with pytest.raises(UsageError, match=r"stage-0 cannot be read.*pathlib.*Path.touch is no part of"):
        read_stage(tmp_path / "run", 0)
    assert not (tmp_path / "ran").exists()


def test_paths_as_cpython_3_13_writes_them_are_read():
    written = b"cpathlib._local\nPosixPath\n(Vstage-0\ntR."
    assert checkpoint.tensors._Unpickler(io.BytesIO(written)).load() == Path("stage-0")


# -- what cannot be written -------------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_kept_leaves_what_was(tmp_path):
    save(tmp_path / "run", 1)
    with pytest.raises(UsageError, match=r"stage 1: a checkpoint cannot hold a\.b: it is a function"):
        write(tmp_path / "run", [state(2), {"a": {"b": save}}], manifest())
    assert entered(tmp_path / "run") == 1
    assert names(tmp_path) == ["run"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").write_text("mine")
    with pytest.raises(UsageError, match="file is a file, and a checkpoint a folder"):
        begin(tmp_path / "file")
    with pytest.raises(UsageError, match=r"holds 'thesis.tex', which is no part of a checkpoint"):
        begin(tmp_path / "folder")
    with pytest.raises(UsageError, match="file is not a checkpoint but a file"):
        read_manifest(tmp_path / "file")
    with pytest.raises(UsageError, match=r"folder is not a whole checkpoint: manifest.json is missing"):
        read_manifest(tmp_path / "folder")
    with pytest.raises(UsageError, match=r"no checkpoint at .*none"):
        read_manifest(tmp_path / "none")
    with pytest.raises(OSError, match="the checkpoint could not be written: Not a directory"):
        begin(tmp_path / "file" / "run")
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("size", [100_000, 62_000, 58_900])
def test_a_full_disk_keeps_the_former(size, small_disk):
    """A quarter of a megabyte is there; four more do not fit: the first of them, or the last."""
    path = small_disk / f"run-{size}"
    write(path, [state(1, size=64_000)], manifest(entered=1))
    with pytest.raises(OSError, match=r"could not be written: No space left.*still is.*stage-") as error:
        write(path, [state(2, size)] * 4, manifest(entered=2))
    assert error.value.errno == errno.ENOSPC
    assert str(small_disk) in str(error.value)
    assert names(small_disk) == [path.name]
    verify(path)
    assert_same(read_stage(path, 0), state(1, size=64_000))
    shutil.rmtree(path)


class Stop(BaseException):
    """As a signal's handler raises it."""


CALLS = ["mkdir", "fsync", "rename", "open"]


def failing(call, at, error):
    """As `call`, but the one of this number fails. Also how many calls are left until then."""
    left = [at]

    def patched(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise error
        return call(*args, **kwargs)

    return patched, left


ERRORS = {"full": OSError(errno.ENOSPC, "No space left on device"), "ctrl-c": KeyboardInterrupt(), "stop": Stop()}


@pytest.mark.parametrize(("call", "error"), in_turn(CALLS, list(ERRORS), rounds=3, slow=2))
def test_an_error_in_any_call_keeps_the_former(call, error, tmp_path, monkeypatch):
    """Patched calls: the first fails, then the second, until no call is left to fail."""
    path, error = tmp_path / "run", ERRORS[error]
    for at in range(100):
        save(path, 1)
        patched, left = failing(getattr(os, call), at, error)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, patched)
            stopped = stops(path, type(error))
        assert names(tmp_path) == ["run"]
        assert entered(path) in ((2,) if stopped is None else (1, 2))  # a folder that is there need not be made
        if left[0] >= 0:
            break
        assert isinstance(error, OSError) <= (stopped is None or str(tmp_path) in stopped)
    assert at > 0
    assert entered(path) == 2


def stops(path, kind):
    """What is said when saving fails, None if it does not."""
    try:
        save(path, 2)
    except kind as error:
        return str(error) or kind.__name__
    return None


# -- what is found after a crash ---------------------------------------------------------------------------------------


def killed_between_renames(tmp_path):
    save(tmp_path / "run", 1)
    partial = begin(tmp_path / "run")
    write_stage(partial, 0, state(2))
    (tmp_path / "run").rename(tmp_path / ".run.former")
    return tmp_path / "run"


@pytest.mark.parametrize("in_the_way", [False, True])
def test_between_two_renames_the_former_is_found(in_the_way, tmp_path):
    path = killed_between_renames(tmp_path)
    if in_the_way:
        path.mkdir()  # by a script that begins so
    assert entered(path) == 1
    discard(path)
    assert names(tmp_path) == ["run"]
    assert entered(path) == 1


def test_the_next_save_clears_what_was_left(tmp_path):
    path = killed_between_renames(tmp_path)
    partial = begin(path)
    assert names(tmp_path) == [".run.partial", "run"]
    assert names(partial) == []
    assert entered(path) == 1
    save(path, 3)
    assert entered(path) == 3
    assert names(tmp_path) == ["run"]


def test_a_former_half_removed_is_not_taken_for_a_checkpoint(tmp_path):
    save(tmp_path / "run", 1)
    shutil.copytree(tmp_path / "run", tmp_path / ".run.former")
    (tmp_path / ".run.former" / "manifest.json").unlink()
    assert entered(tmp_path / "run") == 1
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(UsageError, match="no checkpoint at"):
        read_manifest(tmp_path / "run")
    save(tmp_path / "run", 2)
    assert names(tmp_path) == ["run"]
