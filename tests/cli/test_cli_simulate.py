"""stretto simulate as a user calls it; what it says is compared with closed forms."""

import json
from statistics import stdev
from xml.etree import ElementTree

import pytest

from cluster_text import cluster_text
from stretto.cli import main
from stretto.report.units import duration


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def facts(capsys, *words):
    assert main(["simulate", *map(str, words), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_one_minibatch_of_eight_micro_batches(capsys):
    found = facts(capsys, "--method", "1f1b", "--stages", 4, "--microbatches", 8, "--forward", 1, "--backward", 2)
    assert (found["makespan"], found["bubble"]) == (33, 3 / 11)
    assert (found["microbatches"], found["minibatches"]) == (8, 1)
    assert (found["steady_period"], found["steady_bubble"]) == (33, 3 / 11)
    assert [each["busy"] for each in found["workers"]] == [24] * 4
    assert [each["peak_activations"] for each in found["workers"]] == [4, 3, 2, 1]
    assert [each["weight_versions"] for each in found["workers"]] == [1] * 4


@pytest.mark.parametrize("S", [1, 3, 6])
@pytest.mark.parametrize("M", [1, 5, 12])
def test_micro_batches_of_synchronous_pipelines_are_one_minibatch(capsys, S, M):
    for name in ("gpipe", "1f1b"):
        found = facts(capsys, "--method", name, "--stages", S, "--microbatches", M, "--forward", 3, "--backward", 4)
        assert found["makespan"] == (M + S - 1) * 7
        assert found["bubble"] == pytest.approx((S - 1) / (M + S - 1))
        assert found["method"] == f"{name}(microbatches={M})"
    held = [each["peak_activations"] for each in found["workers"]]
    assert held == [min(M, S - s) for s in range(S)]


def test_interleaved_and_zero_bubble(capsys):
    W, v, M = 3, 2, 6
    found = facts(capsys, "--method", "interleaved", "--stages", v * W, "--workers", W, "--microbatches", M)
    assert found["makespan"] == (v * M + W - 1) * 3
    assert [each["stages"] for each in found["workers"]] == [[0, 3], [1, 4], [2, 5]]
    assert [each["peak_activations"] for each in found["workers"]] == [
        (v - 1) * W + 2 * (W - 1 - w) + 1 for w in range(W)
    ]
    assert [each["weight_versions"] for each in found["workers"]] == [[1, 1]] * W
    S, M, F, down, own = 4, 8, 3, 2, 1
    words = ["--forward", F, "--input-gradient", down, "--weight-gradient", own]
    found = facts(capsys, "--method", "zb-h1", "--stages", S, "--microbatches", M, *words)
    assert found["makespan"] == M * (F + down + own) + (S - 1) * (F + down - own)


def test_what_a_method_says_itself_wins(capsys):
    found = facts(capsys, "--method", "gpipe(microbatches=4)", "--stages", 2, "--microbatches", 7)
    assert (found["microbatches"], found["minibatches"]) == (8, 2)
    assert found["makespan"] == 2 * (4 + 1) * 3
    assert facts(capsys, "--method", "gpipe", "--stages", 6)["microbatches"] == 6
    assert facts(capsys, "--method", "gpipe", "--stages", 2)["microbatches"] == 4


@pytest.mark.parametrize(
    ("method", "turns", "held", "versions"),
    [
        ("pb", 9, [7, 5, 3, 1], [1, 1, 1, 1]),
        ("pb(stash=True)", 9, [7, 5, 3, 1], [7, 5, 3, 1]),
        ("pipedream", 9, [4, 3, 2, 1], [4, 3, 2, 1]),
        ("pipedream-2bw", 3, [4, 3, 2, 1], [2, 2, 2, 2]),
        ("paci(every=3)", 3, [4, 3, 2, 1], [1, 1, 1, 1]),
        ("backprop", 9, [1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_other_methods_take_as_many_as_enter(capsys, method, turns, held, versions):
    found = facts(capsys, "--method", method, "--stages", 4, "--microbatches", 9)
    assert found["minibatches"] == turns
    assert [each["peak_activations"] for each in found["workers"]] == held
    assert [each["weight_versions"] for each in found["workers"]] == versions
    if method != "backprop":
        assert (found["steady_bubble"], found["bubble"] > 0) == (0, True)


def test_times_by_stage_and_latency(capsys):
    words = ["--method", "gpipe", "--stages", "3", "--microbatches", "4", "--backward", "4,1,1"]
    found = facts(capsys, *words, "--forward", "1,5,2", "--latency", "0.5")
    assert found["makespan"] == 8 + 3 * 5 + 6 + 3 * 4 + 4 * 0.5
    assert [each["busy"] for each in found["workers"]] == [20, 24, 12]
    assert found["workers"][1]["busy_share"] == 24 / 43
    assert facts(capsys, *words, "--forward", "1", "5", "2", "--latency", "0.5") == found
    assert (
        facts(capsys, "--method", "pipedream", "--stages", "4", "--latency", "2")["steady_period"] == 3 + 2 * 3 * 2 / 4
    )
    assert facts(capsys, "--method", "backprop", "--workers", "1", "--latency", "2")["makespan"] == 4 * 4 * 3


def test_drawing_and_table(capsys, tmp_path):
    words = ["simulate", "--method", "pipedream", "--stages", "2", "--forward", "0.2", "--svg", "deep/s.svg"]
    assert main([*words, "--latency", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "worker 1  .   .   .   1F0==== 1B0============" in out
    assert "(one column is 0.1)" in out
    assert "0       0       2.4   70.6%  2                 2" in out  # 2.4 of (4 + 1) 0.6 + 4 ways of 0.1
    assert ElementTree.parse(tmp_path / "deep" / "s.svg").getroot().tag.endswith("svg")
    assert main(["simulate", "--method", "pipedream", "--forward", "3.14159,1,1,2.7"]) == 0
    out = capsys.readouterr().out
    assert "\nworker 2  ........F0....F1.........B0= F2......" in out
    assert "\n(to scale, with names as short as the room)\n" in out


def test_show_draws_the_same_minibatch(capsys):
    assert main(["show", "1f1b", "--stages", "4", "--microbatches", "8", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["makespan"], shown["microbatches"], shown["bubble"]) == (33, 8, 3 / 11)
    assert main(["show", "paci(every=3)", "--stages", "4", "--microbatches", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["microbatches"] == 9


def test_a_trace_for_perfetto_holds_what_was_simulated(capsys, tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    found = facts(capsys, "--method", "1f1b", "--stages", 4, "--latency", 0.5, "--trace", "deep/a.pftrace")
    assert found["trace"] == "deep/a.pftrace"
    trace = Trace()
    trace.ParseFromString((tmp_path / "deep" / "a.pftrace").read_bytes())
    processes = [each.track_descriptor.process.process_name for each in trace.packet]
    assert [name for name in processes if name] == [f"worker {worker}: stage {worker}" for worker in range(4)]
    flows = [flow for each in trace.packet for flow in each.track_event.flow_ids]
    ends = [flow for each in trace.packet for flow in each.track_event.terminating_flow_ids]
    assert sorted(flows) == sorted(ends) == list(range(1, 2 * 3 * 4 + 1)), "up and down, three borders, four"
    assert max(each.timestamp for each in trace.packet) == found["makespan"] * 1_000_000


def test_a_trace_that_cannot_be_written_is_a_mistake(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["simulate", "--method", "pb", "--trace", "file/a.pftrace"]) == 2
    assert "cannot write to file/a.pftrace" in capsys.readouterr().err


@pytest.mark.slow
def test_late_messages_are_drawn_several_times(capsys, tmp_path):
    file = tmp_path / "late.toml"
    file.write_text(f"{cluster_text(workers=2)}late_share = 0.2\nlate_seconds = 0.01\n")
    words = ["--method", "1f1b(microbatches=4)", "--model", "mlp", "--stages", 2, "--cluster", file]
    found = facts(capsys, *words)
    assert found["late_draws"] == len(found["makespans"]) == 8
    assert len({*found["makespans"]}) > 1
    assert found["makespan"] == pytest.approx(sum(found["makespans"]) / 8)
    assert found["makespan_standard_error"] == pytest.approx(stdev(found["makespans"]) / 8**0.5)
    assert found["steady_period_standard_error"] > 0
    assert facts(capsys, *words) == found
    assert main(["simulate", *map(str, words)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "some messages are late, at random: times above are means of 8 draws" in said
    errors = " and ".join(duration(found[f"{name}_standard_error"]) for name in ("makespan", "steady_period"))
    assert f"with standard errors of {errors}" in said
    file.write_text(f"{cluster_text(workers=2)}late_share = 0.2\n")
    assert main(["simulate", *map(str, words)]) == 2
    assert "links.loop.late_share = 0.2, late_seconds = None: give both" in capsys.readouterr().err
