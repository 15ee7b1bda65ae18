"""stretto calibrate: processes of its own, and those of a launcher."""

import json
import sys

import pytest

from stretto.cli import main
from stretto.collectives import ALGORITHMS, Calibration
from stretto.cost import find_cluster
from stretto.errors import StrettoError

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


@pytest.mark.skipif(sys.platform != "linux", reason="starts processes by torch's launcher")
@pytest.mark.slow
def test_a_machine_as_a_cluster(capsys, tmp_path):
    file = tmp_path / "cluster.toml"
    assert main(["calibrate", "--quick", "--json", "--out", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    told = json.loads(captured.out)
    cluster = find_cluster(str(file))
    assert told["cluster"]["links"]["within"]["latency"] == cluster.link(0, 1).latency
    assert cluster.num_workers == 2
    device = cluster.device(0)
    for operator in ("linear", "convolution", "batch-norm", "layer-norm", "attention", "embedding", "pooling"):
        for direction in ("forward", "backward"):
            rate = device.rates[operator][direction]
            assert rate.seconds(4, 1e6, 1e6) > 0
            assert rate.contention >= 1
            assert rate.residual is not None
    assert {"sgd", "adam", "copy", "elementwise", "transcendental"} < set(device.rates)
    assert device.peak_of("float32") > 1e8
    assert told["noise"] >= 0
    assert [each.name for each in tmp_path.iterdir()] == ["cluster.toml"]


def test_messages_that_other_work_has_kept_waiting_are_no_link():
    from stretto.measure.machine_calibration import link_of

    with pytest.raises(StrettoError, match="messages of 1048576 bytes took no longer than those of 256: other work"):
        link_of(((256, 3e-3), (1 << 20, 1e-3)))


def test_the_table_of_a_machine(capsys, tmp_path):
    from stretto.cli.calibrate import tell_machine
    from stretto.measure.machine_calibration import Findings
    from stretto.measure.messages import Passage
    from stretto.measure.overhead import Overhead
    from stretto.measure.rates import MeasuredCase

    sizes = (1024, 1 << 20)
    passed = tuple(Passage(n, 2e-4 + n * 6e-10, 1e-5 + n * 1.4e-8, 3e-4) for n in sizes)
    points = [MeasuredCase("linear", "forward", (c, 1e9, 1e6), 0.1 + c * 1e-5, 0.15) for c in (1, 2)]
    points.append(MeasuredCase("copy", "forward", (1, 0, 2e6), 1e-3, 1e-3))
    found = Findings(workers=2, per_node=2, points=tuple(points), within=tuple((n, 1e-4 + n * 1e-9) for n in sizes),
                     between=(), within_passages=passed, between_passages=(), overhead=Overhead(2e-5, 1e-3),
                     additions=tuple((n, n * 1e-10) for n in sizes), load=0.0)  # fmt: skip
    tell_machine(found, tmp_path / "c.toml", json=False, quiet=False)
    told = capsys.readouterr().out
    assert told.startswith("layers")
    assert "messages within nodes: alpha 100 µs, beta 1.00 ms a MB, residual 0.0 %" in told
    ends = "its sender 200 µs + 600 µs a MB, its receiver 300 µs + 0.00 µs a MB, its way 10.00 µs + 14.0 ms a MB"
    assert f"messages within nodes while both compute: {ends}" in told
    assert "additions: gamma 100 µs a MB" in told
    assert "the runtime: 20.0 µs an action, 1.00 ms a step" in told
    assert "1.50x" in told
    assert told.endswith("c.toml\n")
    tell_machine(found, tmp_path / "c.toml", json=False, quiet=True)
    assert capsys.readouterr().out == ""


def test_an_interrupted_calibration_leaves_no_file(capsys, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.study.run_processes.launch", interrupted)
    assert main(["calibrate", "--out", str(tmp_path / "cluster.toml")]) == 130
    assert "interrupted; nothing has been written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_table(capsys, monkeypatch):
    from stretto.collectives import Link
    from stretto.collectives.calibration import SizeTimes

    link = Link(latency=1e-4, seconds_per_byte=1e-9, reduction_seconds_per_byte=2e-10)
    seconds = {"torch": 3e-4, "ring": 2.5e-4, "single-master": 4e-4}
    fixed = Calibration(workers=2, per_node=1, link=link, measured=(SizeTimes(1024, seconds),))
    monkeypatch.setattr(sys.modules["stretto.cli.calibrate"], "measured", lambda *_: fixed.to_dict())
    assert main([*SMALL, "--workers", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["1.00", "KiB", "torch", "300", "µs"]
    assert lines[2] == ["1.00", "KiB", "ring", "250", "µs", "2", "1.00", "KiB", "201", "µs", "1.24", "fastest"]
    assert lines[3][:5] == ["1.00", "KiB", "single-master", "400", "µs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate", "--sizes", "1024"], "sizes is for --collectives: add it, or leave sizes out"),
        (["calibrate", "--per-node", "2"], "per_node is for --collectives"),
        (["calibrate", "--workers", "1"], "workers=1: messages take two processes or more"),
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
