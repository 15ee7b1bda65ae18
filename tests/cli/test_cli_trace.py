"""stretto train --trace, and the timeline that the report then has."""

import json

import pytest

import stretto
from cluster_text import cluster_text
from stretto.cli import main
from stretto.simulate import simulate
from stretto.simulate.timeline import recordings
from stretto.study.overlay import overlaid
from stretto.tracing import read_recordings

RUN = ["train", "--model-options.width", "8", "--model-options.depth", "3", "--steps", "24", "--evaluations", "2",
       "--method", "pb"]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_traced_run_has_a_trace_and_a_timeline(capsys, tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    assert main([*RUN, "--out", "run", "--trace", "a/run.pftrace", "--json"]) == 0
    json.loads(capsys.readouterr().out)
    recordings = read_recordings(tmp_path / "run")
    assert [each.worker for each in recordings] == [0, 1, 2]
    trace = Trace()
    trace.ParseFromString((tmp_path / "a" / "run.pftrace").read_bytes())
    begins = [each for each in trace.packet if each.track_event.type == each.track_event.Type.Value("TYPE_SLICE_BEGIN")]
    work = [each for each in begins if "compute" in each.track_event.categories]
    assert len(work) == sum(span.lane == "compute" for each in recordings for span in each.spans) == 3 * 24 * 3
    assert [name_of(each) for each in begins if "phase" in each.track_event.categories] == ["ramp", "steady", "drain"]
    pauses = {(name_of(each)) for each in begins if "pause" in each.track_event.categories}
    assert pauses == {"evaluation"}
    assert main(["report", "run", "--quiet"]) == 0
    assert "<h2>Timelines</h2>" in (tmp_path / "run" / "report.html").read_text()


def name_of(packet):
    return packet.track_event.name


@pytest.mark.slow
def test_a_traced_run_beside_its_simulation_and_its_prediction(capsys, tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    (tmp_path / "cluster.toml").write_text(cluster_text("three", 3, bandwidth="1e9"))
    assert main([*RUN, "--out", "run", "--trace", "run.pftrace", "--quiet"]) == 0
    for words, source in ((), "the run's own actions"), (("--cluster", "cluster.toml"), "on the cluster 'three'"):
        assert main(["simulate", "--overlay", "run", *words, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert source in told["source"]
        assert told["simulated"] / told["measured"] - 1 == pytest.approx(told["error"])
        assert told["first"] + told["steps"] <= 24
        assert (told["phase"], told["shown"], told["ramp_steps"]) == ("steady", [1, 24], 5)
        assert [part["phase"] for part in told["phases"]] == ["ramp", "steady", "drain"]
        assert told["pauses"] == 1  # that at the end came after everything
        trace = Trace()
        trace.ParseFromString((tmp_path / told["trace"]).read_bytes())
        described = [packet.track_descriptor for packet in trace.packet if packet.HasField("track_descriptor")]
        names = [track.process.process_name for track in described if track.HasField("process")]
        assert names == [f"{group}, worker {n}: stage {n}" for n in range(3) for group in ("measured", "simulated")]
    assert main(["report", "run", "--cluster", "cluster.toml", "--quiet"]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<h2>Predicted and measured</h2>" in page
    assert "on the cluster &#39;three&#39;" in page
    assert "stage 2, activations" in page


@pytest.mark.parametrize(
    ("method", "steps"),
    [("pb", 3), ("pb", 9), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gpipe", 3), ("greedy", 2)))],
)
def test_a_short_runs_overlay_is_the_simulation_of_the_same_turns(capsys, tmp_path, method, steps):
    """Its recordings replaced by simulated ones, of processes: then the overlay has the same spans and figures."""
    small = ["train", "--model-options.width", "8", "--model-options.depth", "3", "--evaluations", "1"]
    words = ["--steps", str(steps), "--method", method, "--out", "run", "--trace", "run.pftrace", "--quiet"]
    assert main([*small, *words]) == 0
    schedule, rules = stretto.method(method).plan(3, None)
    timeline = simulate(schedule, rules, steps, lambda action: 1000 * (1 + action.stage))
    for recording in recordings(timeline, rules, unit=1):
        recording.process = recording.worker + 1
        recording.write(tmp_path / "run")
    both, phases, run = overlaid(tmp_path / "run")
    assert run.phase == ("steady" if steps - run.ramp_steps > 3 else "whole run")
    assert run.measured == pytest.approx(run.simulated)
    assert [each.spans for each in both[::2]] == [each.spans for each in both[1::2]]
    measured, simulated = phases.values()
    assert measured == simulated
    assert [part.measured for part in run.phases] == [part.simulated for part in run.phases]
    assert main(["simulate", "--overlay", "run"]) == 0
    said = capsys.readouterr().out
    assert ("in the steady state, steps" in said) == (run.phase == "steady")
    after = "the first one" if method == "gpipe" else f"a ramp of {run.ramp_steps}"
    assert (f"the steady state, after {after}. Of" in said) == (run.phase != "steady")
    assert ("phase of a step, mean (least to most)" in said) == bool(run.step_phases) == (method == "gpipe")
    assert "off by +0.0%" in said or "off by -0.0%" in said


def test_a_finished_run_gives_its_trace_again_if_it_has_one(capsys, tmp_path):
    assert main([*RUN, "--out", "run", "--trace", "one.pftrace", "--quiet"]) == 0
    assert main([*RUN, "--out", "run", "--trace", "two.pftrace", "--quiet"]) == 0
    assert (tmp_path / "one.pftrace").read_bytes() == (tmp_path / "two.pftrace").read_bytes()


def test_a_trace_of_a_run_that_was_made_without_is_refused(capsys, tmp_path):
    assert main([*RUN, "--out", "run", "--quiet"]) == 0
    assert main(["report", "run", "--quiet"]) == 0
    assert "<h2>Timelines</h2>" not in (tmp_path / "run" / "report.html").read_text()
    assert main([*RUN, "--out", "run", "--trace", "run.pftrace"]) == 2
    assert "without --trace" in capsys.readouterr().err
