"""Operations inside actions: they lie in their action's slice, nested, and training comes to the same numbers."""

import json
from itertools import pairwise

import pytest
import torch
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

import stretto
from stretto.cli import main
from stretto.study.operation_profile import OperationProfile, profiled_steps
from stretto.tracing import Recording, Span, perfetto, read_recordings
from stretto.tracing.operation_spans import OPERATION, PROFILED, by_action, outermost, shallow
from stretto.tracing.run_phases import action_of


def spans_of(recording, lane):
    return [span for span in recording.spans if span.lane == lane]


def op(name, start, end):
    return Span(OPERATION, name, start, end)


def test_operations_belong_to_the_action_of_their_middle():
    actions = [Span("compute", "0F0", 10, 20), Span("compute", "0B0", 20, 40)]
    found = by_action(actions, [op("c", 38, 44), op("b", 12, 15), op("a", 9, 19), op("late", 60, 61), op("d", 13, 16)])
    assert found == [[op("a", 10, 19), op("b", 12, 15), op("d", 13, 15)], []] or found[0][:2] == [
        op("a", 10, 19), op("b", 12, 15),
    ]  # fmt: skip
    assert found[0][2] == op("d", 13, 15)  # rounding made it longer than the one it is in
    assert found[1] == []  # the middle of "c" is after the action
    assert outermost(found[0]) == [op("a", 10, 19)]


def test_where_there_are_too_many_the_innermost_are_left_out():
    inside = [[op("a", 0, 9), op("b", 1, 5), op("c", 2, 3), op("d", 6, 8)], [op("a", 20, 30), op("b", 20, 30)]]
    names = [[[span.name for span in part] for part in shallow(inside, most)] for most in (9, 5, 4, 1)]
    assert names == [[list("abcd"), list("ab")], [list("abd"), list("ab")], [["a"], ["a"]], [[], []]]


@pytest.mark.parametrize(
    ("done", "steps", "ramp", "expected"),
    [(0, 30, 7, [9, 10, 11]), (0, 9, 7, [7, 8, 9]), (0, 3, 7, [2, 3]), (0, 1, 7, [1]), (10, 30, 1, [13, 14, 15])],
)
def test_the_steps_that_are_profiled(done, steps, ramp, expected):
    assert list(profiled_steps(done, steps, ramp)) == expected


def check(recordings):
    """Every operation lies in an action, actions of all kinds have some, and outermost ones add up to no more."""
    seen = set()
    for recording in recordings:
        actions = spans_of(recording, "compute")
        operations = spans_of(recording, OPERATION)
        inside = by_action(actions, operations)
        assert sum(map(len, inside)) == len(operations)
        for action, those in zip(actions, inside, strict=True):
            assert all(action.start <= each.start <= each.end <= action.end for each in those)
            tops = outermost(those)
            assert all(one.end <= other.start for one, other in pairwise(tops))
            assert sum(each.end - each.start for each in tops) <= action.end - action.start
            seen |= {(action_of(action).kind, each.name) for each in those}
    for kind, name in (("F", "aten::addmm"), ("B", "aten::mm")):
        assert (kind, name) in seen
    assert any(kind == "U" for kind, _ in seen)
    assert not any("what time" in name for _, name in seen)


def made():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU()) for _ in range(3)]
    return stretto.Trainer(
        layers, torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), method="pb",
        example=torch.randn(8, 32), seed=0,
    )  # fmt: skip


def test_an_emulated_run_trains_the_same_numbers():
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    plain, profiled = made(), made()
    recordings = profiled.record()
    profile = OperationProfile(profiled, recordings, range(6, 8))
    for step in range(1, 10):
        plain.step(x, y)
        with profile.around(step):
            profiled.step(x, y)
    assert all(map(torch.equal, plain.model.state_dict().values(), profiled.model.state_dict().values()))
    check(recordings)
    assert [span.name for span in spans_of(recordings[0], PROFILED)] == ["step 6", "step 7"]
    first, last = spans_of(recordings[0], PROFILED)
    assert all(first.start <= span.start <= last.end for each in recordings for span in spans_of(each, OPERATION))


def test_an_error_in_a_profiled_step_ends_the_profiler():
    trainer = made()
    profile = OperationProfile(trainer, trainer.record(), range(1, 3))
    with pytest.raises(RuntimeError, match="mine"), profile.around(1):
        raise RuntimeError("mine")
    with profile.around(2):
        trainer.step(torch.randn(8, 32), torch.randn(8, 32))


def test_slices_in_perfetto_are_nested(tmp_path):
    recording = Recording(0)
    for lane, name, start, end in [
        ("compute", "0F0", 10, 20), ("compute", "0U0", 20, 20), ("compute", "0F1", 20, 30),
        (OPERATION, "a", 10, 18), (OPERATION, "b", 12, 18), (OPERATION, "c", 18, 20), (OPERATION, "d", 22, 23),
    ]:  # fmt: skip
        recording.span(lane, name, start, end)
    perfetto.write([recording], tmp_path / "t.pftrace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "t.pftrace").read_bytes())
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    assert len({packet.track_event.track_uuid for packet in events}) == 1
    depth, said = 0, []
    for packet in events:
        if packet.track_event.name:
            said.append((depth, packet.track_event.name, packet.timestamp))
            depth += 1
        else:
            depth -= 1
    assert depth == 0
    assert said == [(0, "0F0", 10), (1, "a", 10), (2, "b", 12), (1, "c", 18), (0, "0U0", 20), (0, "0F1", 20),
                    (1, "d", 22)]  # fmt: skip


SMALL = ["--model-options.width", "8", "--model-options.depth", "2", "--steps", "10", "--evaluations", "1", "--quiet"]


@pytest.mark.parametrize("workers", [[], pytest.param(["--workers", "2"], marks=pytest.mark.slow)])
def test_train_on_request(capfd, tmp_path, monkeypatch, workers):
    monkeypatch.chdir(tmp_path)
    words = ["train", "--method", "1f1b", "--stages", "2", *SMALL, *workers]
    assert main([*words, "--out", "plain"]) == 0
    assert main([*words, "--out", "profiled", "--trace-operations"]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "profiled")]
    assert weights[0] == weights[1]
    check(read_recordings(tmp_path / "profiled"))
    assert (tmp_path / "profiled" / "trace.pftrace").is_file()
    said = capfd.readouterr()
    # Another test may have begun torch's profiler in this process, which learns once how much it is to say.
    assert not [line for line in said.err.splitlines() if not line.startswith("USDT:")]
    assert not said.out
    assert main([*words, "--out", "plain", "--trace-operations"]) == 2
    assert "without --trace: delete it" in capfd.readouterr().err
    assert main(["simulate", "--overlay", "profiled", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["first"], told["steps"]) == (6, 4)  # the first after those under the profiler


@pytest.mark.slow
def test_compare_on_request(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "compare",
        "--methods",
        "greedy",
        "--lr",
        "0.1",
        "--seeds",
        "1",
        "--batch-size",
        "32",
        "--jobs",
        "1",
        "--out",
        "study",
    ]
    assert main([*words, *SMALL[:-1], "--trace-operations"]) == 0
    assert "traces of 1 of 1 runs" in capsys.readouterr().out
    (run,) = (tmp_path / "study" / "runs").iterdir()
    check(read_recordings(run))
    assert (run / "trace.pftrace").is_file()
    assert "<h2>Timelines</h2>" in (tmp_path / "study" / "report.html").read_text()
