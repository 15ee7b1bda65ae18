"""Where calibrations are kept for a user and a machine, which of them `auto` goes by, and that all processes do."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import stretto
from collectives.test_calibration import calibration
from runtime.processes import launch
from stretto import UsageError
from stretto.cli import main
from stretto.collectives import ALGORITHMS, stored_calibration
from stretto.collectives.calibration import SizeTimes
from stretto.doctor import environment as doctor
from stretto.replicas import find
from stretto.system import path_names


def preferring(algorithm, workers=2, host="", machines=1):
    """A calibration in which one algorithm was the fastest for all sizes."""
    rows = tuple(SizeTimes(size, {**dict.fromkeys(ALGORITHMS, 2.0), algorithm: 1.0}) for size in (1024, 1 << 20))
    return replace(calibration(workers, per_node=1), measured=rows, host=host, machines=machines)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "stretto"


def test_the_user_folder_of_each_platform(monkeypatch, tmp_path):
    assert path_names.user_cache() == tmp_path / "cache" / "stretto"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "Local"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification has programs ignore
    places = {"linux": ".cache/stretto", "darwin": "Library/Caches/stretto", "win32": "Local/stretto"}
    for platform, place in places.items():
        monkeypatch.setattr(sys, "platform", platform)
        assert path_names.user_cache() == tmp_path / place


def test_the_newest_of_each_size_is_kept_whole(cache):
    first = stored_calibration.keep(preferring("ring", 4, host=stored_calibration.host()))
    assert first == cache / "all-reduce" / stored_calibration.host() / "4-processes-1-machines.toml"
    assert stored_calibration.keep(preferring("double-tree", 4, host=stored_calibration.host())) == first
    stored_calibration.keep(preferring("ring", 8))
    (first.parent / "notes.txt").write_text("not ours")
    assert sorted(stored_calibration.kept()) == [(4, 1), (8, 1)]
    assert stored_calibration.read_kept(first).fastest(4, 1024) == "double-tree"
    assert [each.name for each in first.parent.iterdir() if each.name.startswith(".")] == []


def test_auto_goes_by_the_nearest_size_measured_on_as_many_machines():
    assert stored_calibration.basis(4).calibration is None
    assert "stretto calibrate --collectives --workers 4" in stored_calibration.basis(4).words
    for workers, machines in ((2, 1), (8, 1), (4, 2)):
        stored_calibration.keep(preferring("ring", workers, machines=machines))
    sizes = (2, 3, 4, 5, 99)
    chosen = {
        (size, machines): stored_calibration.basis(size, machines).calibration for size in sizes for machines in (1, 2)
    }
    assert [chosen[size, 1].workers for size in sizes] == [2, 2, 8, 8, 8]
    assert {chosen[size, 2].workers for size in sizes} == {4}
    assert stored_calibration.basis(4, machines=3).calibration is None
    assert "among 3 machines" in stored_calibration.basis(4, machines=3).words
    assert "what 3 take follows from its messages" in stored_calibration.basis(3).words
    assert "8-processes-1-machines.toml, measured among 8 processes" in stored_calibration.basis(8).words
    assert stretto.collectives.Calibration.of(json.loads(json.dumps(chosen[4, 1].to_dict()))) == chosen[4, 1]


def test_a_file_that_is_named_wins(tmp_path):
    stored_calibration.keep(preferring("ring"))
    file = tmp_path / "mine.toml"
    file.write_text(preferring("double-tree", host="elsewhere").to_toml())
    found = stored_calibration.basis(2, named=str(file))
    assert found.calibration.fastest(2, 64) == "double-tree"
    assert found.words == f"{file}, measured among 2 processes on elsewhere"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "all_reduce is missing"),
        ("[devices.cpu]\nmemory = 1.0", "a cluster, which stretto plan takes"),
        ("\x00", "no TOML"),
        ("workers = 2\nall_reduce = 3", "no list of tables"),
        ("per_node = 3", "per_node=3: 4 workers do not divide into such nodes"),
        ("workers = true", "workers=True"),
        ("machines = 0", "machines=0"),
        ("latency = nan", "latency=nan"),
        ("latency = 'x'", "latency='x'"),
        ("all_reduce = []", "all_reduce is empty"),
        ("[[all_reduce]]\nbytes = 4\nseconds = { ring = -1.0 }", "ring=-1.0"),
        ("[[all_reduce]]\nbytes = 4\nseconds = { torch = 1.0 }", "none is an algorithm"),
        ("[[all_reduce]]\nbytes = 0.5\nseconds = { ring = 1.0 }", "bytes=0.5"),
        ("[[all_reduce]]\nseconds = { ring = 1.0 }", "bytes is missing"),
        ("host = 3", "host=3"),
    ],
)
def test_damaged_and_foreign_files_are_refused(text, said):
    import tomllib

    import tomli_w

    file = stored_calibration.keep(calibration())
    file.write_text(text)
    if said not in ("all_reduce is missing", "no TOML") and "cluster" not in said:
        file.write_text(tomli_w.dumps({**calibration().to_dict(), **tomllib.loads(text)}))
    with pytest.raises(UsageError) as raised:
        stored_calibration.basis(4)
    assert str(file) in str(raised.value)
    assert said in str(raised.value)
    assert "write one with stretto calibrate --collectives" in str(raised.value)
    assert "or delete it, and built-in constants decide" in str(raised.value)
    assert doctor.try_check("all-reduce", doctor.all_reduce).state == "broken"


def test_another_machines_file_is_refused_unless_it_is_named():
    file = stored_calibration.keep(preferring("ring", host="another"))
    with pytest.raises(UsageError, match=r"was measured on another, and this is .*--workers 2.*calibration='"):
        stored_calibration.basis(2)
    assert stored_calibration.basis(2, named=str(file)).calibration is not None


def test_the_doctor_says_which_file_is_used_or_what_to_do():
    found = doctor.try_check("all-reduce", doctor.all_reduce)
    assert found.state == "missing"
    assert "built-in constants" in found.detail
    assert "stretto calibrate --collectives --workers N" in found.detail
    file = stored_calibration.keep(preferring("ring", 4))
    found = doctor.try_check("all-reduce", doctor.all_reduce)
    assert (found.state, found.detail) == ("good", f"all-reduce(algorithm=auto) goes by {file} (4 processes)")


def test_the_choice_is_written_as_it_is_read():
    for path in ("cal.toml", "/a b/c's.toml", "word", "none", "two-words"):
        sync = stretto.AllReduce(algorithm="auto", calibration=path)
        assert find(str(sync)) == sync
    assert str(stretto.AllReduce(algorithm="recursive-doubling")) == "all-reduce(algorithm=recursive-doubling)"
    for algorithm, file in (("ring", "f"), (None, "f"), ("auto", 3)):
        with pytest.raises(UsageError, match="calibration="):
            stretto.AllReduce(algorithm=algorithm, calibration=file)


def test_in_emulation_a_named_file_must_be_one(tmp_path):
    from collectives.scripts import trainer

    with pytest.raises(UsageError, match=r"no calibration in .*absent.toml"):
        trainer(f"all-reduce(algorithm=auto, calibration='{tmp_path / 'absent.toml'}')")
    trainer("all-reduce(algorithm=auto)")


def test_all_processes_choose_as_the_first_one_finds(tmp_path, monkeypatch):
    """Four processes, two replicas of two stages; each has a cache of its own, with another favourite, or none."""
    for rank, algorithm in enumerate(["double-tree", "ring", None, "single-master"]):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(rank)))
        if algorithm is not None:
            stored_calibration.keep(preferring(algorithm, host=stored_calibration.host()))
    (tmp_path / "0" / "named.toml").write_text(preferring("parameter-server").to_toml())
    by_own, by_none, by_named = zip(*launch(4, "collectives.scripts:what_auto_chose", str(tmp_path)), strict=True)
    assert [algorithms for algorithms, _ in by_own] == [["double-tree"]] * 4
    assert [said for _, said in by_own[1:]] == [""] * 3
    file = f"{tmp_path / '0' / 'stretto' / 'all-reduce' / stored_calibration.host()}/2-processes-1-machines.toml"
    assert (
        by_own[0][1]
        == f"all-reduce(algorithm=auto) goes by {file}, measured among 2 processes on {stored_calibration.host()}"
    )
    assert [algorithms for algorithms, _ in by_none] == [by_none[0][0]] * 4
    assert by_none[0][0] not in (["double-tree"], ["ring"], ["single-master"])
    assert "goes by built-in constants: no calibration" in by_none[0][1]
    assert "measure it with stretto calibrate --collectives --workers 2" in by_none[0][1]
    assert [algorithms for algorithms, _ in by_named] == [["parameter-server"]] * 4


def test_a_damaged_file_of_the_first_process_stops_all(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "0"))
    stored_calibration.keep(preferring("ring")).write_text("damaged")
    told = launch(2, "collectives.scripts:refused", str(tmp_path), "all-reduce(algorithm=auto)")
    assert None not in told
    said = next(said for kind, said in told if kind == "UsageError")
    assert "2-processes-1-machines.toml is no calibration" in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts processes by torch's launcher")
def test_what_calibrate_keeps_is_what_training_goes_by(capsys, tmp_path):
    words = ["train", "--model", "mlp", "--data", "digits", "--steps", "2", "--stages", "2", "--workers", "2",
             "--data-parallel", "2", "--method", "1f1b", "--sync", "all-reduce(algorithm=auto)"]  # fmt: skip
    assert main(["calibrate", "--collectives", "--sizes", "1024", "--workers", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    file = Path(told["kept"])
    assert (told["out"], told["host"], told["machines"]) == (None, stored_calibration.host(), 1)
    assert stored_calibration.kept() == {(2, 1): file}
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    said = f"all-reduce(algorithm=auto) goes by {file}, measured among 2 processes on {stored_calibration.host()}"
    assert "".join(said.split()) in "".join(capsys.readouterr().out.split())  # in lines of 80 columns
    file.write_text("damaged")
    assert main([*words, "--out", str(tmp_path / "other")]) == 2
    assert "is no calibration" in capsys.readouterr().err  # before any process starts
    assert not (tmp_path / "other").exists()
    file.unlink()
    assert main(["doctor", "--json"]) == 0
    checks = {each["name"]: each for each in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["all-reduce"]["state"] == "missing"
