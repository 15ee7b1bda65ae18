"""stretto calibrate: processes of its own, and those of a launcher."""

import json
import sys

import pytest

from stretto.cli import main
from stretto.collectives import ALGORITHMS, Calibration

SMALL = ["calibrate", "--collectives", "--sizes", "1024,65536"]


@pytest.mark.skipif(sys.platform != "linux", reason="starts processes by torch's launcher")
def test_a_calibration_of_two_processes(capsys, tmp_path):
    file = tmp_path / "collectives.toml"
    assert main([*SMALL, "--workers", "2", "--json", "--out", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    told = json.loads(captured.out)
    assert told["workers"] == 2
    assert min(told[key] for key in ("latency", "seconds_per_byte", "reduction_seconds_per_byte")) >= 0
    assert set(told["fastest"]) == {"1024", "65536"}
    assert set(told["fastest"].values()) <= set(ALGORITHMS)
    rows = {(row["bytes"], row["algorithm"]): row for row in told["all_reduce"]}
    assert len(rows) == 2 * (len(ALGORITHMS) + 1)
    assert rows[65536, "ring"]["messages"] == 2
    assert rows[65536, "ring"]["sent"] == 65536
    assert rows[65536, "ring"]["seconds"] == pytest.approx(
        rows[65536, "ring"]["predicted"] * rows[65536, "ring"]["ratio"]
    )
    kept = Calibration.read(file)
    assert kept.link.latency == told["latency"]
    assert kept.fastest(2, 1024) == told["fastest"]["1024"]


def test_the_table(capsys, monkeypatch):
    from stretto.collectives import Link
    from stretto.collectives.calibration import Measured

    link = Link(latency=1e-4, seconds_per_byte=1e-9, reduction_seconds_per_byte=2e-10)
    seconds = {"torch": 3e-4, "ring": 2.5e-4, "single-master": 4e-4}
    fixed = Calibration(workers=2, per_node=1, link=link, measured=(Measured(1024, seconds),))
    monkeypatch.setattr(sys.modules["stretto.cli.calibrate"], "measured", lambda *_: fixed)
    assert main([*SMALL, "--workers", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["1.00", "KiB", "torch", "300", "µs"]
    assert lines[2] == ["1.00", "KiB", "ring", "250", "µs", "2", "1.00", "KiB", "201", "µs", "1.24", "fastest"]
    assert lines[3][:5] == ["1.00", "KiB", "single-master", "400", "µs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate"], "say what to measure: --collectives"),
        (SMALL, "workers=None: messages take two processes or more; give --workers 2"),
        ([*SMALL, "--workers", "1"], "workers=1"),
        (["calibrate", "--collectives", "--workers", "2", "--sizes", "7"], "sizes=7"),
        ([*SMALL, "--workers", "4", "--per-node", "3"], "per_node=3 among 4 processes"),
    ],
)
def test_mistakes(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_processes_that_a_launcher_has_started_are_counted(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    assert main([*SMALL, "--workers", "2"]) == 2
    assert "workers=2, but 4 processes have been started" in capsys.readouterr().err
