"""stretto plan, and what runs and draws its files."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from cluster_text import cluster_text
from pairwise import thinned
from stretto.cli import main
from stretto.report import Point, Record
from stretto.settings.runs import CompareSettings
from stretto.study import resolve_study

CNN = ("--model", "cnn", "--model-options.depth", 3)


def four(memory="4e9", bandwidth="2e9"):
    return cluster_text("four", 4, memory=memory, bandwidth=bandwidth, price=0.1)


@pytest.fixture
def cluster(tmp_path):
    def write(memory="4e9", bandwidth="2e9"):
        file = tmp_path / "cluster.toml"
        file.write_text(four(memory, bandwidth))
        return str(file)

    return write


def run(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def mistake(capsys, *words):
    assert main([*map(str, words)]) == 2
    return capsys.readouterr().err


def test_a_plan_is_written_trained_and_drawn(capsys, tmp_path, cluster):
    file = tmp_path / "plan.toml"
    told = run(capsys, "plan", "--workers", 2, "--cluster", cluster(), "--out", file, "--methods", "1f1b",
               "--stages", 2, "--all-workers", "--batch-size", 64, "--explain", "--export", "torch",
               "--roofline", tmp_path / "roofline.svg")  # fmt: skip
    passes = told["roofline"]["passes"]
    assert [each["kind"] for each in passes] == ["F", "B"] * (len(passes) // 2)
    assert all(each["attained"] <= each["bound"] * (1 + 1e-9) for each in passes)
    picture = (tmp_path / "roofline.svg").read_text()
    assert picture.count("<title>") == len(passes)
    assert f"a micro-batch of {64 / told['chosen']['microbatches']:g}, float32" in picture
    assert told["plan"] == str(file)
    assert told["predicted_seconds"] > 0
    assert len(told["predicted_bytes"]) == 2
    assert told["candidates"] >= told["priced"] > 0
    assert told["search_seconds"] > 0
    assert {each["choice"].split()[0] for each in told["explain"]} >= {"recompute", "micro-batches"}
    known = tomllib.loads(file.read_text())
    assert known["train"]["bounds"] == known["plan"]["bounds"]
    assert known["plan"]["pipeline"] == 2
    assert sum(known["predicted"]["seconds"].values()) == pytest.approx(known["predicted"]["seconds_per_step"])
    assert (tmp_path / "plan.csv").read_text().startswith("0F0,")
    assert list(json.loads((tmp_path / "plan.split.json").read_text())) == [str(known["plan"]["bounds"][1])]
    drawn = run(capsys, "show", "--plan", file)
    assert (drawn["method"], drawn["stages"]) == (known["plan"]["method"], 2)
    settings = run(capsys, "train", "--plan", file, "--dry-run", "--steps", 3)
    for key in ("method", "bounds", "workers", "stages", "batch_size"):
        assert settings[key] == known["train"][key]
    assert run(capsys, "train", "--plan", file, "--dry-run", "--batch-size", 32)["batch_size"] == 32
    words = ["--method", known["plan"]["method"], "--stages", 2, "--steps", 2]
    trained = run(capsys, "train", *words, "--bounds", "0,3,8", "--model-options.depth", 8, "--out", tmp_path / "run")
    assert trained["steps"] == 2


@pytest.mark.parametrize(
    ("method", "workers"),
    thinned([("zb-v", 2), ("looped-bfs", 2), ("pb-lwp", 2), ("overlapping(delay=0)", 2), ("chunked", 4)], 2),
)
def test_every_sort_of_plan_can_be_trained_and_drawn(capsys, tmp_path, cluster, method, workers):
    file = tmp_path / "plan.toml"
    told = run(capsys, "plan", "--workers", workers, "--cluster", cluster(), "--out", file, "--methods", method,
               "--all-workers", "--batch-size", 32)  # fmt: skip
    assert told["chosen"]["method"].startswith(method.removesuffix(")"))
    settings = run(capsys, "train", "--plan", file, "--dry-run")
    assert (settings["workers"], settings["bounds"]) == (workers, told["chosen"]["bounds"])
    drawn = run(capsys, "show", "--plan", file)
    assert (drawn["method"], drawn["workers"]) == (told["chosen"]["method"], told["chosen"]["pipeline"])


@pytest.mark.slow
def test_a_plan_in_a_v_trains_on_two_processes(capsys, tmp_path, cluster):
    file = tmp_path / "plan.toml"
    told = run(capsys, "plan", "--workers", 2, "--cluster", cluster(), "--out", file, "--methods", "zb-v",
               "--all-workers", "--batch-size", 32, "--model-options.width", 16)  # fmt: skip
    trained = run(capsys, "train", "--plan", file, "--steps", 2, "--out", tmp_path / "run")
    assert trained["steps"] == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["method"] == told["chosen"]["method"]


def test_a_published_network_with_batch_norm(capsys, cluster):
    """Its costs are counted on the meta device, where buffers have no values."""
    words = ("--model", "resnet18", "--dtype", "float32", "--workers", 1, "--methods", "backprop")
    assert run(capsys, "plan", *words, "--cluster", cluster())["predicted_seconds"] > 0


def test_a_network_without_data_is_planned_by_its_options(capsys, tmp_path):
    file = tmp_path / "plan.toml"
    shape = {"depth": 2, "width": 256, "heads": 4, "context": 64, "vocabulary": 512}
    words = [word for key, value in shape.items() for word in (f"--model-options.{key}", value)]
    limits = ("--workers", 8, "--all-workers", "--tensor", 4, "--pipeline", 2, "--batch-size", 8, "--methods", "1f1b",
              "--recompute", "none", "--sequence-parallel", "no")  # fmt: skip
    told = run(capsys, "plan", "--model", "decoder", *words, "--cluster", "8-a100", *limits, "--out", file)
    assert (told["chosen"]["tensor"], told["chosen"]["pipeline"], told["chosen"]["optimizer"]) == (4, 2, "adam")
    network = told["network"]
    assert network["parameters"] == 2 * (12 * 256**2 + 13 * 256) + (2 * 512 + 64 + 2) * 256
    assert network["model_options"] == shape | {
        "attention": "scores", "dropout": 0.1, "tied": False, "positions": "learned", "norm": "layer", "gated": False,
        "bias": True, "fused": True, "loss": "torch",
    }  # fmt: skip
    assert tomllib.loads(file.read_text())["model_options"] == network["model_options"]
    drawn = run(capsys, "show", "--plan", file)
    assert (drawn["model"], drawn["model_options"]) == ("decoder", network["model_options"])
    assert "tensor=8" in mistake(capsys, "plan", "--model", "decoder", *words, "--cluster", "8-a100", "--tensor", 8,
                               "--recompute", "none", "--sequence-parallel", "no")  # fmt: skip


@pytest.mark.slow
def test_a_name_of_a_model_that_trains_with_a_shape_instead_of_data(capsys, tmp_path):
    words = ("plan", "--model", "resnet", "--model-options.depth", 18, "--model-options.side", 64, "--cluster",
             "8-a100", "--workers", 2, "--methods", "backprop", "--out", tmp_path / "p.toml")  # fmt: skip
    told = run(capsys, *words)
    assert (told["network"]["parameters"], told["network"]["model_options"]["side"]) == (11_689_512, 64)
    assert "network 'resnet' is planned for without data" in mistake(capsys, *words, "--data", "digits")
    assert "loss='mse_loss'" in mistake(capsys, *words, "--loss", "mse_loss")


def test_a_method_that_wants_another_optimizer(capsys, cluster):
    words = ["plan", "--cluster", cluster(), "--methods", "nesterov", "--workers", 2]
    assert "built on nadam, and the optimizer is 'sgd'" in mistake(capsys, *words)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (("--pipeline", 1, "--data-parallel", 2, "--sharding", "fully-shard"), {"data": 2, "sharding": "fully-shard"}),
        (("--pipeline", "1,2", "--tensor", 2, "--data-parallel", 1), {"pipeline": 1, "tensor": 2}),
        pytest.param((*CNN, "--space", "2,1"), {"space": [2, 1], "pipeline": 1}, marks=pytest.mark.slow),
        pytest.param(
            (*CNN, "--space", "1,2", "1,1", "--data-parallel", 1, "--pipeline", 1, "--tensor", 1),
            {"space": [1, 2]},
            marks=pytest.mark.slow,
        ),
        ((*CNN, "--space", 1, 2, "--space", "4,1", "--tensor", 1), {"space": [1, 2]}),
    ],
)
def test_one_configuration_is_priced(capsys, tmp_path, cluster, words, chosen):
    file = tmp_path / "plan.toml"
    told = run(capsys, "plan", "--workers", 2, "--all-workers", "--cluster", cluster(), "--out", file, *words)
    assert {key: told["chosen"][key] for key in chosen} == chosen
    assert told["predicted_seconds"] == tomllib.loads(file.read_text())["predicted"]["seconds_per_step"] > 0


@pytest.mark.slow
def test_limits_in_a_file(capsys, tmp_path, cluster):
    file, base = tmp_path / "limits.toml", ("plan", "--cluster", cluster(), "--out", tmp_path / "p.toml")
    text = 'model = "cnn"\nmodel_options.depth = 3\nworkers = 2\nmethods = "1f1b"\npipeline = [1, 2]\n'
    for space in ("[2, 1]", '["2,1", "4,1"]', '"2,1"'):
        file.write_text(f"{text}space = {space}\n")
        assert run(capsys, base[0], file, *base[1:])["chosen"]["space"] == [2, 1]


def test_limits_that_cannot_be(capsys, tmp_path, cluster):
    base = ("plan", "--cluster", cluster(), "--out", tmp_path / "p.toml")
    for words, said in (
        (("--workers", 2, "--pipeline", 4), "--pipeline 4: pipeline x data-parallel x tensor x space is the number of"),
        (("--space", "2,1"), "no layer of this model convolves or pools images"),
        ((*CNN, "--space", "4,1", "1,4"), "in layer 2..loss images have fewer rows than 4,1 has parts"),
        (("--space", 2), "'2' is 1 numbers: give pairs, 2,1 1,1"),
        (("--sharding", "fully-shared"), "did you mean 'fully-shard'"),
        (("--workers", 1, "--sharding", "fully-shard"), "replicas, of which there must be at least 2"),
    ):
        assert said in mistake(capsys, *base, *words)


def test_two_plans_differ(capsys, tmp_path, cluster):
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file, batch in zip(files, (32, 64), strict=True):
        run(capsys, "plan", "--workers", 2, "--cluster", cluster(), "--out", file, "--batch-size", batch)
    rows = {row["key"]: row for row in run(capsys, "plan", "--diff", *files)["differences"]}
    assert (rows["plan.batch_size"]["a"], rows["plan.batch_size"]["b"]) == (32, 64)
    assert run(capsys, "plan", "--diff", files[0], files[0])["differences"] == []


def test_a_frontier_of_time_memory_and_money(capsys, tmp_path, cluster):
    told = run(capsys, "plan", "--workers", 4, "--cluster", cluster(), "--out", tmp_path / "p.toml", "--frontier",
               "--methods", "synchronous,asynchronous", "--batch-size", 64)  # fmt: skip
    points = [(each["seconds"], each["bytes"], each["money"]) for each in told["frontier"]]
    assert len(points) > 1
    for one in points:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)


def test_the_energy_of_a_step_and_of_an_example(capsys, tmp_path):
    """One worker is never idle; of a pipeline of two, each waits for a part of the step."""
    file = tmp_path / "power.toml"
    file.write_text(cluster_text("power", 2, price=0.1, power="watts = 100.0\nidle_watts = 20.0\n"))
    words = ("plan", "--cluster", file, "--out", tmp_path / "p.toml", "--batch-size", 64, "--objective", "energy")
    told = run(capsys, *words)
    assert told["chosen"]["workers"] == 1
    joules = told["predicted"]["joules_per_step"]
    assert joules == pytest.approx(100 * told["predicted_seconds"])
    assert told["objective"] == {"goal": "energy", "value": pytest.approx(joules / 64)}
    pair = run(capsys, *words, "--all-workers", "--pipeline", 2, "--frontier")
    seconds = pair["predicted_seconds"]
    assert 2 * 20 * seconds < pair["predicted"]["joules_per_step"] < 2 * 100 * seconds
    assert all(point["joules"] > joules for point in pair["frontier"])
    assert main([*map(str, words)]) == 0
    assert re.search(r"energy +[\d.]+ .?Wh a step, [\d.]+ .?Wh an example", capsys.readouterr().out)


def test_goodput_of_a_plan_and_of_many_workers(capsys, tmp_path, cluster):
    pytest.importorskip("altair")
    words = ("plan", "--model", "mlp", "--cluster", cluster(), "--out", tmp_path / "p.toml", "--methods", "backprop")
    writing = ("--checkpoint-seconds", 2, "--restart-seconds", 60)
    failing = (*writing, "--mtbf-hours", 1000)
    told = run(capsys, *words, *failing, "--scale", "1,1000")
    left, step = told["goodput"], told["predicted_seconds"]
    assert left["mtbf_seconds"] == pytest.approx(3.6e6 / told["chosen"]["workers"])
    assert left["interval_seconds"] == pytest.approx(left["checkpoint_steps"] * step)
    assert left["interval_seconds"] == pytest.approx((2 * 2 * left["mtbf_seconds"]) ** 0.5, rel=0.01)  # Young's
    rows = [row for row in told["scaling"]["rows"] if row["way"] == "data parallel" and row["goodput"]]
    assert [row["goodput"] for row in rows] == sorted((row["goodput"] for row in rows), reverse=True)
    assert all(row["useful"] == pytest.approx(row["goodput"] * row["throughput"]) for row in rows)
    assert "Useful throughput" in (tmp_path / "p.html").read_text()
    sure = run(capsys, *words, *writing, "--mtbf-hours", "inf")["goodput"]
    assert (sure["share"], sure["mtbf_seconds"], sure["checkpoint_steps"]) == (1, None, None)


def test_goodput_that_cannot_be_told(capsys, tmp_path, cluster):
    words = ("plan", "--model", "mlp", "--cluster", cluster(), "--out", tmp_path / "p.toml")
    said = mistake(capsys, *words, "--restart-seconds", 60)
    assert "needs more figures: give --mtbf-hours" in said
    assert "; and --checkpoint-seconds, or --storage-bandwidth" in said
    assert "mtbf_hours = 0: it must be more than 0" in mistake(capsys, *words, "--mtbf-hours", 0)
    assert "seconds of work between" in mistake(capsys, *words, "--checkpoint-interval", "often")
    both = ("--checkpoint-seconds", 5, "--storage-bandwidth", 1e9)
    assert "give one of them" in mistake(capsys, *words, *both)
    assert "energy: the power of a device is not known" in mistake(capsys, *words, "--objective", "energy")


def test_the_time_to_a_loss_weighs_penalties(capsys, tmp_path, cluster):
    words = ["plan", "--workers", 4, "--cluster", cluster(), "--out", tmp_path / "p.toml", "--objective", "loss",
             "--critical-batch", 100, "--least-steps", 50, "--batch-size", "32,64,128", "--methods", "1f1b,pb",
             "--stages", 4]  # fmt: skip
    told = run(capsys, *words, "--penalties.pb", 1000)
    assert told["chosen"]["method"].startswith("1f1b")
    assert told["objective"]["penalty_is"] == "law"
    assert told["objective"]["steps"] == pytest.approx(50 * (1 + 100 / told["chosen"]["batch_size"]))
    given = run(capsys, *words, "--penalties.pb", 0.001)
    assert (given["chosen"]["method"], given["objective"]["penalty_is"]) == ("pb", "given")


def test_what_cannot_fit_is_told_with_a_plan_that_would(capsys, cluster):
    told = mistake(capsys, "plan", "--workers", 2, "--cluster", cluster(memory="2e5"), "--batch-size", 64)
    for part in ("no plan fits", "worker 0", "more than its memory of 200 kB", "times as many workers"):
        assert part in told


def test_mistakes_in_clusters_and_options(capsys, cluster, tmp_path):
    assert "links.loop.bandwidth = -1" in mistake(capsys, "plan", "--cluster", cluster(bandwidth="-1.0"))
    file = tmp_path / "cluster.toml"
    file.write_text(four().replace('within = "loop"', 'within = "lop"'))
    assert "there is no such link" in mistake(capsys, "plan", "--cluster", file)
    assert "cluster is missing" in mistake(capsys, "plan")
    assert "did you mean '1f1b'" in mistake(capsys, "plan", "--cluster", cluster(), "--methods", "1f1")
    assert "critical" in mistake(capsys, "plan", "--cluster", cluster(), "--objective", "loss")
    assert "choose from 1 to 4" in mistake(capsys, "plan", "--cluster", cluster(), "--workers", 9)
    words = ["plan", "--cluster", cluster(), "--objective", "loss", "--critical-batch", 9]
    assert "penalties.pb='x': give a positive number" in mistake(capsys, *words, "--penalties.pb", "x")
    assert "no plan in" in mistake(capsys, "train", "--plan", tmp_path / "none.toml")
    assert "a method, a plan or a file" in mistake(capsys, "show")


def write_study(folder, factors, *, leave_out=0):
    """A finished study whose methods come to a loss of 0.5 after 40 (1 + 50 / batch) steps, times a factor."""
    settings = resolve_study(
        CompareSettings(methods=tuple(factors), stages=4, batch_size=(16, 64), lr=(0.1,), seeds=2,
                        model_options={"depth": 4, "width": 8})
    )  # fmt: skip
    folder.mkdir()
    (folder / "study.json").write_text(json.dumps({"settings": settings.to_json(), "left_out": {}}))
    for run in settings.runs()[leave_out:]:
        goal = 40 * (1 + 50 / run.batch_size) * factors[run.method] * (1 + 0.1 * run.seed)
        points = [
            Point(step=step, examples=0, total_flops=0, serial_flops=0, seconds=0, validation_loss=1,
                  train_loss=max(0.2, 1 - step / (2 * goal))) for step in range(10, 400, 10)
        ]  # fmt: skip
        options = {"lr": run.lr, "batch_size": run.batch_size}
        record = Record(id=run.id, method=run.method, seed=run.seed, options=options, status="finished")
        events = [*({"event": "evaluation", **each.to_json()} for each in points), {"event": "finished"}]
        own = folder / "runs" / run.id
        own.mkdir(parents=True)
        (own / "run.json").write_text(json.dumps({"settings": run.to_json(), "record": record.to_json()}))
        (own / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_penalties_from_a_study(capsys, tmp_path, cluster):
    write_study(tmp_path / "study", {"backprop": 1, "pb": 1.25, "greedy": 100})
    words = ["plan", "--workers", 4, "--cluster", cluster(), "--out", tmp_path / "p.toml", "--objective", "loss",
             "--stages", 4, "--pipeline", 4, "--batch-size", "32,64", "--measured", tmp_path / "study"]  # fmt: skip
    told = run(capsys, *words, "--target-loss", 0.5)
    study = told["penalties"]["study"]
    assert (study["loss"], study["baseline"], study["seeds"], study["stages"]) == (0.5, "backprop", 2, 4)
    assert study["never"] == ["greedy"]
    assert told["penalties"]["critical_batch"] == pytest.approx(50, rel=1e-3)
    (pb,) = told["penalties"]["methods"]
    assert (pb["method"], pb["is"], pb["factor"]) == ("pb", "measured", pytest.approx(1.25))
    chosen = run(capsys, *words, "--target-loss", 0.5, "--methods", "pb")
    goal, batch = chosen["objective"], chosen["chosen"]["batch_size"]
    assert goal["penalty_is"] == "measured"
    assert goal["steps"] == pytest.approx(40 * 1.05 * (1 + 50 / batch) * 1.25, rel=1e-3)
    told = run(capsys, *words, "--target-loss", 0.5, "--methods", "pb,paci,spectrain", "--penalties.spectrain", 2)
    kinds = {each["method"]: each["is"] for each in told["penalties"]["methods"]}
    assert kinds == {"pb": "measured", "paci": "assumed", "spectrain": "given"}
    assert main([*map(str, words), "--target-loss", "0.5"]) == 0
    shown = capsys.readouterr().out
    assert "steps to train loss 0.5 on 4 stages, against backprop, 2 seeds" in shown
    assert "left out, as they never came to that loss: greedy" in shown


def test_studies_that_say_nothing(capsys, tmp_path, cluster):
    write_study(tmp_path / "pb", {"pb": 1})
    write_study(tmp_path / "half", {"backprop": 1, "pb": 1}, leave_out=1)
    write_study(tmp_path / "whole", {"backprop": 1, "greedy": 100})
    words = ["plan", "--cluster", cluster(), "--out", tmp_path / "p.toml", "--objective", "loss", "--measured"]
    assert "no backprop to compare steps with" in mistake(capsys, *words, tmp_path / "pb")
    assert "1 of 8 runs are not finished" in mistake(capsys, *words, tmp_path / "half")
    whole = tmp_path / "whole"
    assert "its least was 0.2: choose a larger --target-loss" in mistake(capsys, *words, whole, "--target-loss", 0.1)
    assert "none of greedy came to" in mistake(capsys, *words, whole, "--target-loss", 0.5, "--methods", "greedy")
    assert "add --objective loss" in mistake(capsys, "plan", "--cluster", cluster(), "--measured", whole)
    assert "add --measured" in mistake(capsys, "plan", "--cluster", cluster(), "--target-loss", 0.5)


def test_scaling_is_printed_and_drawn(capsys, tmp_path, cluster):
    words = ["plan", "--workers", 2, "--cluster", cluster(), "--out", tmp_path / "p.toml", "--batch-size", 32,
             "--methods", "gpipe,backprop", "--recompute", "none", "--scale", "1,4,1000"]  # fmt: skip
    told = run(capsys, *words)["scaling"]
    assert {(row["workers"], row["way"]) for row in told["rows"]} >= {(1, "hybrid"), (1000, "data parallel")}
    assert [row["batch"] for row in told["batches"][::3]] == [2, 8, 32, 128, 512]
    assert "<h2>Scaling</h2>" in (tmp_path / "p.html").read_text()
    assert told["page"] == str(tmp_path / "p.html")
    assert main([*map(str, words[:-1]), "1", "--per-worker"]) == 0
    assert "drawn in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("float32 = 5e10", "float32 = -5e10", "devices.cpu.peak.float32 = -5e+10: it must be more than 0"),
        ("memory_bandwidth = 1e10", "memory_bandwidth = -1", "cpu.memory_bandwidth = -1: it must be more than 0"),
        ("latency = 5e-5", "latency = -5e-5", "links.loop.latency = -5e-05: it must be 0 or more"),
        ("[links.loop]", "[devices.cpu.rates.linear.forward]\nper_flop = -1e-11\n[links.loop]",
         "devices.cpu.rates.linear.forward.per_flop = -1e-11: it must be 0 or more"),
        (', within = "loop"', "", "groups[0].within is missing: name the link between the 4 workers of a node"),
        ("nodes = 1", "nodes = 2", "groups[0].between is missing: name the link between the 2 nodes"),
        ('within = "loop"', 'within = "lop"', "groups[0].within = 'lop': there is no such link: did you mean 'loop'?"),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be(capsys, tmp_path, cluster, old, new, told):
    file = tmp_path / "broken.toml"
    text = four().replace(old, new)
    assert new in text
    file.write_text(text)
    found = mistake(capsys, "plan", "--cluster", file)
    assert str(file) in found
    assert told in found


def test_which_bound_fails_by_how_much_and_what_would_fit(capsys, cluster):
    found = mistake(capsys, "plan", "--workers", 2, "--cluster", cluster(memory="1e5"), "--batch-size", 64)
    needed, room = 758e3, 100e3
    for part in (
        "fails on worker 0 (layers 0 to 7)", "of weights, gradients and optimizer state", "of activations",
        f"{needed / 1e3:.0f} kB in all", f"are {(needed - room) / 1e3:.0f} kB more than its memory of 100 kB",
        "It would fit with 8 times as many workers", "on the fullest worker",
    ):  # fmt: skip
        assert part in found
    nowhere = mistake(capsys, "plan", "--workers", 2, "--cluster", cluster(memory="1e3"), "--batch-size", 64)
    assert re.search(r"Nor would it fit on 64 times as many workers: layer \d alone has \S+ kB of weights", nowhere)
    assert "no device has more memory than 1 kB" in nowhere
    words = ["plan", "--workers", 3, "--all-workers", "--methods", "zb-v", "--batch-size", 2, "--cluster", cluster()]
    assert "no way to divide 8 layers and batches of 2 examples among 3 workers" in mistake(capsys, *words)


OWN = """
import torch
from torch import nn

def build():
    layers = [nn.Linear(8, 8) for _ in range(5)]
    return nn.Sequential(layers[0], nn.ReLU(inplace=True), *layers[1:]), torch.zeros(4, 8)

def bare():
    return nn.Linear(2, 2)
"""


def test_a_model_of_one_s_own(capsys, tmp_path, cluster):
    (tmp_path / "own.py").write_text(OWN)
    file = tmp_path / "plan.toml"
    words = ("--workers", 2, "--all-workers", "--methods", "1f1b", "--stages", 2, "--batch-size", 64)
    own = f"{tmp_path / 'own.py'}:build"
    told = run(capsys, "plan", "--model", own, "--cluster", cluster(), "--out", file, *words)
    plan = tomllib.loads(file.read_text())["plan"]
    assert "train" not in tomllib.loads(file.read_text())
    assert (plan["bounds"][0], plan["bounds"][-1]) == (0, 6)
    assert 1 not in plan["bounds"], "the second layer overwrites what the first gives"
    assert f"stretto.split(model, {plan['bounds']}, example=x)" in told["script"]
    assert f'"{plan["method"]}"' in told["script"]


def test_mistakes_about_a_model_of_one_s_own(capsys, tmp_path, cluster):
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path / 'own.py'}"
    for words, said in (
        (("--model", f"{own}:bare"), "gives no example of its input: add --data"),
        (("--model", f"{own}:bild"), "did you mean 'build'"),
        (("--model", f"{own}:build", "--model-options.depth", 3), "takes no argument 'depth'"),
        (("--model", "mpl"), "or write package.module:function"),
    ):
        assert said in mistake(capsys, "plan", "--cluster", cluster(), *words)


TOLD = """
import os

import torch
from torch import nn


class Told(nn.Linear):
    def forward(self, x):
        if self.training and not isinstance(self.weight, torch._subclasses.FakeTensor):
            self.calls += 1  # once, and taken back, where the stages are compared with the model
            if self.calls > 2:
                open(f"on-{os.environ.get('LOCAL_RANK')}-{self.index}", "w").close()
        return super().forward(x.flatten(1))


def build():
    layers = [Told(64, 64) for _ in range(9)]
    for index, layer in enumerate(layers):
        layer.index, layer.calls = index, 0
    return nn.Sequential(*layers, nn.Linear(64, 10))
"""


@pytest.mark.slow
def test_stages_are_trained_on_the_workers_of_the_plan(capsys, tmp_path, monkeypatch, cluster):
    """The fast worker is the second process that is started: it trains the first and longer stage."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TOLD)
    Path(cluster()).write_text(cluster_text("four", 2).replace("workers = 2", "workers = 2, speeds = [0.3, 1.0]"))
    words = ["--model", "own.py:build", "--data", "digits"]
    told = run(capsys, "plan", "--cluster", "cluster.toml", *words, "--methods", "1f1b", "--pipeline", 2,
               "--batch-size", 64, "--microbatches", 4)  # fmt: skip
    assert told["chosen"]["placement"] in ([0, 1], [1, 0])
    by_worker = {each["workers"][0]: each["stages"] for each in told["places"]}
    bounds = told["chosen"]["bounds"]
    sizes = {worker: bounds[stage + 1] - bounds[stage] for worker, (stage,) in by_worker.items()}
    assert sizes[1] > sizes[0]
    settings = run(capsys, "train", "--plan", "plan.toml", *words, "--dry-run", "--placement", "1,0")
    assert settings["placement"] == [1, 0]
    trained = run(
        capsys, "train", "--plan", "plan.toml", *words, "--steps", 2, "--evaluations", 1, "--placement", "1,0"
    )
    assert trained["steps"] == 2
    seen = {worker: {int(file.name[5:]) for file in tmp_path.glob(f"on-{worker}-*")} for worker in (0, 1)}
    assert min(seen[1]) == 0
    assert max(seen[1]) < min(seen[0])
    assert "placement=1,0 with workers=3" in mistake(capsys, "train", "--plan", "plan.toml", *words, "--workers", 3,
                                                     "--placement", "1,0")  # fmt: skip
    assert "placement=1,1: give another worker" in mistake(capsys, "train", "--plan", "plan.toml", *words,
                                                            "--placement", "1,1")  # fmt: skip


def test_stages_of_a_worker_share_its_memory_as_they_need_it(capsys, cluster, tmp_path, monkeypatch):
    """Interleaved: the last of four stages takes more than half of its worker's memory, and both together fit."""
    monkeypatch.chdir(tmp_path)
    words = ("plan", "--workers", 2, "--all-workers", "--pipeline", 2, "--methods", "interleaved", "--stages", 4)
    words += ("--recompute", "none", "--batch-size", 64, "--cluster", cluster(memory="8.2e5"))
    found = run(capsys, *words)
    assert found["chosen"]["method"].startswith("interleaved")
    assert found["proven"] is True


def test_a_network_without_data_has_a_dtype_that_devices_know(capsys, tmp_path):
    words = ("--model", "decoder", "--model-options.depth", 1, "--model-options.width", 64, "--model-options.heads", 1,
             "--workers", 1, "--batch-size", 8, "--cluster", "8-v100")  # fmt: skip
    told = run(capsys, "plan", *words, "--out", tmp_path / "plan.toml")
    named = run(capsys, "plan", *words, "--dtype", "float16", "--out", tmp_path / "named.toml")
    assert told["predicted_seconds"] == named["predicted_seconds"]


@pytest.mark.slow
def test_an_optimizer_of_whole_layers_is_planned_without_sharing_them(capsys, tmp_path):
    words = ("--model", "transformer", "--model-options.depth", 2, "--methods", "1f1b", "--optimizer", "muon")
    words += ("--cluster", "8-a100", "--workers", 2)
    assert run(capsys, "plan", *words, "--out", tmp_path / "plan.toml")["chosen"]["tensor"] == 1
