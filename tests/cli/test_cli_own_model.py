"""The user's own network, data, loss, metrics and optimizer, from the command line."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from stretto.cli import main
from stretto.study.trial_processes import take_place_and_resolve

OWN = """
import torch
from torch import nn

WEIGHTS = 1


def build(width=16):
    torch.manual_seed(WEIGHTS)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def pair(number, seed):
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :1] * x[:, 1:2]


def data():
    return pair(24, 0), pair(12, 1), pair(12, 2)


def loss(output, target):
    return ((output - target) ** 2).mean()


def mae(output, target):
    return (output - target).abs().mean()


def hits(output, target):
    return ((output - target).abs() < 0.5).sum(), len(target)


hits.higher_is_better = True


def root(output, target):
    return ((output - target) ** 2).mean() ** 0.5


def sgd(params, lr=0.05):
    return torch.optim.SGD(params, lr=lr)
"""
UNEVEN = """
def uneven(output, target):
    counts = target.abs() > 0.5
    return ((output - target) ** 2 * counts).sum() / counts.sum().clamp(min=1)
"""
WORDS = ["--model", "own.py:build", "--data", "own.py:data", "--loss", "own.py:loss", "--metric", "mae=own.py:mae"]
FEW = ["--steps", "5", "--lr", "0.1", "--batch-size", "24", "--evaluations", "2"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, plain_pages):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    return tmp_path


def run(capsys, *words):
    assert main([*words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def mistake(capsys, *words):
    assert main([*words]) == 2
    return capsys.readouterr().err


def plain_training(steps=5, lr=0.1, momentum=0.9, updates_of=None):
    """Weights, test loss and mean absolute error after full-batch SGD, by hand."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)

    def pair(number, seed):
        x = torch.randn(number, 4, generator=torch.Generator().manual_seed(seed))
        return x, x[:, :1] * x[:, 1:2]

    x, y = pair(24, 0)
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    x, y = pair(12, 2)
    error = (model(x) - y).detach()
    return model.state_dict(), float((error**2).mean()), float(error.abs().mean())


@pytest.mark.parametrize("method", ["backprop", "1f1b(microbatches=3)"])
def test_a_run_is_plain_training_and_its_weights_fit_the_users_module(capsys, method):
    result = run(capsys, "train", *WORDS, *FEW, "--method", method, "--out", "run", "--json")
    weights, loss, mae = plain_training()
    assert result["test_loss"] == pytest.approx(loss, rel=1e-5)
    assert result["test_mae"] == pytest.approx(mae, rel=1e-5)
    saved = load_file("run/model.safetensors")
    assert saved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cut", [
    [], ["--stages", "2"], ["--stages", "2", "--bounds", "0,3,5"],
    pytest.param(["--workers", "2"], marks=pytest.mark.slow),
])  # fmt: skip
def test_the_weights_of_a_list_of_layers_are_named_as_in_a_sequential(capsys, cut):
    Path("layers.py").write_text(f"{OWN}\n\ndef layers():\n    return list(build())\n")
    words = ["--model", "layers.py:layers", *WORDS[2:], *FEW, "--method", "greedy", *cut]
    run(capsys, "train", *words, "--out", "run", "--json")
    assert load_file("run/model.safetensors").keys() == plain_training()[0].keys()
    assert all(name.startswith("heads.") for name in load_file("run/heads.safetensors"))


@pytest.mark.slow
def test_two_processes_come_to_the_same(capsys):
    alone = run(capsys, "train", *WORDS, *FEW, "--method", "1f1b", "--out", "alone", "--stages", "2", "--json")
    two = run(capsys, "train", *WORDS, *FEW, "--method", "1f1b", "--out", "two", "--stages", "2", "--workers", "2",
              "--json")  # fmt: skip
    keys = ("train_loss", "validation_loss", "test_loss", "mae", "test_mae")
    assert [alone[key] for key in keys] == [two[key] for key in keys]
    one, other = load_file("alone/model.safetensors"), load_file("two/model.safetensors")
    assert one.keys() == other.keys() == plain_training()[0].keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_comparison_has_the_metrics_of_every_run(capsys):
    words = ["--methods", "backprop,greedy,pb-lwp-sc", "--seeds", "1", "--jobs", "1", "--metric", "hits=own.py:hits"]
    words += ["--metric", "root=own.py:root"]
    with pytest.warns(match="metric root is no mean over examples: of a batch of") as told:
        result = run(capsys, "compare", *WORDS, *FEW, *words, "--out", "study", "--json")
    assert len(told) == 1, "not of each method and run"
    assert [run["method"] for run in result["runs"]] == ["backprop", "greedy", "pb-lwp-sc"]
    for made in result["runs"]:
        assert 0 < made["mae"] < 5
        assert 0 <= made["hits"] <= 1
        assert made["test_mae"] != made["mae"]
    assert result["runs"][0]["test_mae"] == pytest.approx(plain_training()[2], rel=1e-5)
    written = json.loads(Path("study/study.json").read_text())["settings"]
    assert written["metric"] == [
        "mae=own.py:mae",
        "hits=own.py:hits:higher",
        "root=own.py:root",
    ]  # as the function says
    assert json.loads(Path("study/runs").joinpath(result["runs"][0]["id"], "run.json").read_text())["record"][
        "higher_is_better"
    ] == ["hits"]


def test_replicas_in_a_comparison(capsys):
    words = ["--methods", "backprop", "--seeds", "1", "--jobs", "1", "--data-parallel", "2"]
    result = run(capsys, "compare", *WORDS, *FEW, *words, "--out", "study", "--json")
    assert result["runs"][0]["test_mae"] == pytest.approx(plain_training()[2], rel=1e-5)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ("WEIGHTS = 1", "WEIGHTS = 2", "own.py (or a file that it imports)"),  # the file of the functions
        ("pair(12, 2)", "pair(12, 3)", "own.py (or a file that it imports) and the examples"),  # the test data, too
    ],
)
def test_an_edited_file_is_another_run(capsys, before, after, changed):
    run(capsys, "train", *WORDS, *FEW, "--out", "run", "--json")
    assert "finished already" in said(capsys, "train", *WORDS, *FEW, "--out", "run")
    written = Path("own.py").stat().st_mtime_ns
    Path("own.py").write_text(OWN.replace(before, after))
    os.utime("own.py", ns=(written + 1, written + 1))  # bytecode knows seconds and the length only
    told = mistake(capsys, "train", *WORDS, *FEW, "--out", "run")
    assert f"run holds a run from before {changed} changed" in told
    assert "choose another --out" in told
    told = mistake(capsys, "train", *WORDS, *FEW, "--seed", "7", "--out", "run")
    assert "with other settings (seed: 0 there, 7 here)" in told


def test_what_the_file_imports_and_the_data_count_too(capsys):
    Path("own.py").write_text(OWN.replace("WEIGHTS = 1", "from numbers_of_mine import WEIGHTS"))
    Path("numbers_of_mine.py").write_text("WEIGHTS = 1\n")
    torch.save(torch.ones(3), "unrelated.pt")
    run(capsys, "train", *WORDS, *FEW, "--out", "run", "--json")
    Path("unrelated.pt").unlink()
    assert "finished already" in said(capsys, "train", *WORDS, *FEW, "--out", "run")
    Path("numbers_of_mine.py").write_text("WEIGHTS = 1  # edited\n")
    told = mistake(capsys, "train", *WORDS, *FEW, "--out", "run")
    assert "run holds a run from before own.py (or a file that it imports) changed" in told


def said(capsys, *words):
    assert main([*words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["own.py:sgd", "RMSprop", "adagrad"])
def test_any_optimizer(capsys, optimizer):
    few = [word for word in FEW if word not in ("--lr", "0.1")]
    run(capsys, "train", *WORDS, *few, "--optimizer", optimizer, "--out", "run", "--json")
    settings = json.loads(Path("run/run.json").read_text())["settings"]
    assert settings["lr"] == {"own.py:sgd": 0.05, "RMSprop": 0.01, "adagrad": 0.01}[optimizer]
    if optimizer == "own.py:sgd":
        saved = load_file("run/model.safetensors")
        for name, value in plain_training(lr=0.05, momentum=0)[0].items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)


def test_an_overlay_of_an_own_network_by_the_way_out_that_it_is_told(capsys):
    named = [*WORDS, "--optimizer", "own.py:sgd", "--method", "own.py:method"]
    Path("own.py").write_text(f"{OWN}\nfrom stretto.methods.table import METHODS\n\n\ndef method():\n"
                              "    return METHODS['1f1b']()\n")  # fmt: skip
    run(
        capsys, "train", *named, *FEW[:2], *FEW[4:], "--stages", "2", "--trace", "run.pftrace", "--out", "run", "--json"
    )
    overlay = ["simulate", "--overlay", "run"]
    assert "has the method 'own.py:method'" in mistake(capsys, *overlay)
    told = mistake(capsys, *overlay, "--method", "own.py:method")
    remedy = told.partition("say so in the command: ")[2].split()
    assert run(capsys, *overlay, "--method", "own.py:method", *remedy, "--json")["trace"] == "run/overlay.pftrace"
    other = ["--model", "mlp", *WORDS[2:]]
    assert "model=mlp beside overlay=run, whose run has one" in mistake(capsys, *overlay, *other)
    Path("run/overlay.pftrace").unlink()
    Path("run/overlay.pftrace").symlink_to("../own.py")  # as an archive from others may have it
    assert "overlay.pftrace is a link" in mistake(capsys, *overlay, "--method", "own.py:method", *remedy)


def test_a_file_does_not_say_what_is_called(capsys):
    Path("run.toml").write_text('model = "own.py:build"\n')
    assert "nothing that a file says is executed" in mistake(capsys, "train", "run.toml", *WORDS[2:])
    run(capsys, "train", "run.toml", *WORDS, *FEW, "--out", "run", "--json")  # named in the command
    functions = {"model": "own.py:build", "data": "own.py:data", "loss": "own.py:loss", "metric": ["mae=own.py:mae"]}
    Path("all.toml").write_text("".join(f"{key} = {value!r}\n" for key, value in functions.items()))
    err = mistake(capsys, "train", "all.toml", *WORDS[:2])
    assert "so in the command: --data own.py:data --loss own.py:loss --metric mae=own.py:mae" in err, "all that lack"
    err = mistake(capsys, "report", "run")
    assert "--model own.py:build --data own.py:data --loss own.py:loss --metric mae=own.py:mae" in err
    assert "report:" in said(capsys, "report", "run", *WORDS)
    assert "report:" in said(capsys, "inspect", "run", *WORDS)


SLOW = """
name = "slow"
groups = [{ nodes = 1, workers = 2, device = "slow", within = "line" }]
[devices.slow]
memory = 1e9
memory_bandwidth = 1e18
peak = { float32 = 1e6 }
[links.line]
latency = 0.5
bandwidth = 1e18
"""


@pytest.mark.parametrize(
    "network",
    [
        [*WORDS[:-2], "--optimizer", "rated.py:rated"],
        pytest.param(["--model", "mlp", "--model-options.width", "8"], marks=pytest.mark.slow),
    ],
)
def test_a_simulation_on_a_cluster_is_in_seconds(capsys, network):
    """At 1 MFLOP/s the seconds are the MFLOP of one example, times the examples; a message takes half a second."""
    Path("slow.toml").write_text(SLOW)
    Path("rated.py").write_text(
        "from torch import optim\n\n\ndef rated(params, lr):\n    return optim.SGD(params, lr)\n"
    )
    words = ["simulate", *network, "--method", "gpipe", "--stages", "2", "--microbatches", "1", "--json"]
    flops = run(capsys, *words)
    assert (flops["unit"], flops["batch_size"]) == ("MFLOP", None)
    seconds = run(capsys, *words, "--cluster", "slow.toml", "--batch-size", "8", "--trace", "t.pftrace")
    assert (seconds["unit"], seconds["batch_size"]) == ("s", 8)
    for one, other in zip(flops["workers"], seconds["workers"], strict=True):
        assert other["busy"] == pytest.approx(8 * one["busy"], rel=0.1)  # updates, and losses
    assert seconds["makespan"] == pytest.approx(2 * 0.5 + sum(worker["busy"] for worker in seconds["workers"]))
    assert seconds["steady_period"] == pytest.approx(seconds["makespan"])
    assert Path("t.pftrace").stat().st_size > 0
    assert f"{seconds['makespan']:.3g} s," in said(capsys, *words[:-1], "--cluster", "slow.toml", "--batch-size", "8")


def test_it_is_planned_simulated_and_examined(capsys):
    words = WORDS
    few = ["--batch-size", "24", "--recompute", "none", "--tensor", "1", "--stages", "2"]
    plan = run(capsys, "plan", *words, "--cluster", "8-a100", "--workers", "2", "--methods", "all", *few, "--json")
    assert plan["command"] == f"stretto train --plan plan.toml {' '.join(words)}"
    assert "own.py:build" in mistake(capsys, "train", "--plan", "plan.toml")
    planned = run(capsys, "train", "--plan", "plan.toml", *words, "--steps", "2", "--out", "planned", "--json")
    assert planned["mae"] > 0
    assert "no 'may'" in mistake(capsys, "plan", *words[:-1], "mae=own.py:may", "--cluster", "8-a100")
    assert "no 'may'" in mistake(capsys, "simulate", *words[:-1], "mae=own.py:may", "--method", "1f1b")
    facts = run(
        capsys,
        "simulate",
        *words,
        "--optimizer",
        "adam",
        "--method",
        "1f1b",
        "--stages",
        "2",
        "--microbatches",
        "3",
        "--json",
    )
    assert len(facts["workers"]) == 2
    assert facts["makespan"] > 0
    assert "every method's weights can be guaranteed" in said(capsys, "doctor", *words[:4])


def test_the_plan_of_a_list_of_layers_ends_with_its_command(capsys):
    Path("layers.py").write_text(f"{OWN}\n\ndef layers():\n    return list(build())\n")
    words = ["--model", "layers.py:layers", *WORDS[2:-2]]
    options = ["--data-options.path", "a:b"]  # is no function
    Path("own.py").write_text(OWN.replace("def data()", "def data(path)"))
    printed = said(capsys, "plan", *words, *options, "--cluster", "8-a100", "--workers", "1")
    assert f"\nstretto train --plan plan.toml {' '.join(words)}\n" in printed  # no Python beside it


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "own.py:bild"], "own.py has no 'bild': did you mean 'build'"),
        (["--model", "mine.py:build"], "there is no file mine.py"),
        (["--model", "own.py:WEIGHTS"], "is no function: 1"),
        (["--model", "own.py:loss"], "needs the argument 'output'"),
        (["--model", "own.py:data"], "returned"),
        (["--model-options.wdith", "3"], "takes no argument 'wdith': did you mean 'width'"),
        (["--model-options.width", "0"], "own.py:build"),
        (["--data", "own.py:build"], "return (train, validation) or (train, validation, test)"),
        (["--loss", "mse_los"], "unknown loss 'mse_los': did you mean 'mse_loss'"),
        (["--loss", "auto"], "loss is missing: the targets of own.py:data are torch.float32 [1]"),
        (["--metric", "mae"], "write NAME=path/to/file.py:function"),
        (["--metric", "seed=own.py:mae"], "a run has a seed of its own"),
        (["--metric", "test_mae=own.py:mae,mae=own.py:mae"], "'test_mae' is what 'mae' is called on the test split"),
        (["--optimizer", "sdg"], "unknown optimizer 'sdg': did you mean 'sgd'"),
        (["--optimizer", "lbfgs"], "it evaluates the loss several times a step"),
        (["--optimizer", "adagrad", "--momentum", "0.9"], "optimizer adagrad takes no momentum"),
        (
            ["--optimizer", "own.py:sgd", "--momentum", "0.9"],
            "own.py:sgd takes no momentum: give the function an argument",
        ),
        (["--loss", "own.py:zzz"], "own.py has no 'zzz': choose from build, data, hits, loss, mae, pair, root, sgd"),
        (["--stages", "9"], "9"),
        (["--batch-size", "25"], "batch_size=25, but own.py:data has 24 training examples"),
    ],
)
def test_mistakes(capsys, words, message):
    given = [*WORDS, *FEW]
    for name, value in zip(words[::2], words[1::2], strict=True):
        if name in given and name != "--metric":
            given[given.index(name) + 1] = value
        else:
            given += [name, value]
    assert message in mistake(capsys, "train", *given, "--out", "run")
    assert not Path("run").exists()


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "own.py:rated"], "optimizer own.py:rated needs a rate: give lr, as --lr 0.01"),
        (["--optimizer", "own.py:fixed", "--lr", "0.1"], "lr=0.1: optimizer own.py:fixed takes no lr"),
        (["--optimizer", "adagrad", "--momentum", "0.9"], "optimizer adagrad takes no momentum"),
        (["--optimizer", "own.py:sdg"], "own.py has no 'sdg'"),
        (["--loss", "mse_los"], "unknown loss 'mse_los'"),
        (["--loss", "own.py:los"], "own.py has no 'los'"),
    ],
)
def test_what_needs_no_model_is_refused_before_there_is_one(capsys, verb, words, message):
    made = "    assert False, 'called'\n"
    source = OWN.replace("    return pair(24", f"{made}    return pair(24").replace(
        "    torch.manual_seed(W", f"{made}#"
    )
    optimizers = (f"\n\ndef {each}:\n    return torch.optim.SGD(params, 0.1)\n" for each in SIGNATURES)
    Path("own.py").write_text(source + "".join(optimizers))
    given = WORDS[:-2] if words[0] != "--loss" else WORDS[:-4]
    assert message in mistake(capsys, verb, *given, *words)


SIGNATURES = ("rated(params, lr)", "fixed(params)")


@pytest.mark.parametrize(
    ("line", "replaced", "message"),
    [
        ("    torch.manual_seed(WEIGHTS)\n", "    raise KeyError('what')\n", "raised KeyError: 'what'"),
        ("return pair(24, 0), pair(12, 1), pair(12, 2)", "return pair(24, 0)", "data: train"),
        ("return pair(24, 0), pair(12, 1), pair(12, 2)", "return pair(24, 0), pair(0, 1)", "validation is empty"),
        ("return x, x[:, :1] * x[:, 1:2]", "return x, x[1:, :1]", "of unequal lengths"),
        ("return (output - target).abs().mean()", "return float('nan')", "metric mae is nan on the validation split"),
        ("return (output - target).abs().mean()", "return (output - target).abs()", "metric mae returned Tensor"),
        ("return (output - target).abs().mean()", "return 1 / 0", "metric mae raised ZeroDivisionError"),
        ("return ((output - target) ** 2).mean()", "return (output - target) ** 2", "the loss returned a tensor [24"),
        ("return ((output - target) ** 2).mean()", "return output @ target", "the loss"),
        ("return torch.optim.SGD(params, lr=lr)", "return None", "optimizer"),
    ],
)
def test_functions_that_fail(capsys, line, replaced, message):
    assert line in OWN
    Path("own.py").write_text(OWN.replace(line, replaced))
    words = ["--optimizer", "own.py:sgd"] if "optim" in line else []
    assert message in mistake(capsys, "train", *WORDS, *FEW, *words, "--out", "run")
    assert not Path("run").exists()


def test_data_drawn_without_a_seed_are_the_same_in_every_process(capsys):
    Path("own.py").write_text(OWN.replace(", generator=torch.Generator().manual_seed(seed)", ""))
    words = [*WORDS, *FEW, "--method", "1f1b", "--stages", "2"]
    alone = run(capsys, "train", *words, "--out", "alone", "--json")
    two = run(capsys, "train", *words, "--out", "two", "--workers", "2", "--json")
    assert alone["test_mae"] == two["test_mae"]


def test_data_that_depend_on_the_process_are_refused_once_with_both_ranks(capsys):
    words = ["train", *WORDS, *FEW, "--out", "run", "--quiet"]
    Path("own.py").write_text("import os\n" + OWN.replace("pair(24, 0)", "pair(24, int(os.environ.get('RANK', 0)))"))
    err = mistake(capsys, *words, "--stages", "3", "--workers", "3")
    ranks = "rank 1 has other examples of data own.py:data than rank 0"
    digests = r"digest is '\w+' on rank 0 and '\w+' there"
    assert re.fullmatch(rf"stretto: {re.escape(ranks)}: {digests}\. Let it return the same .*\n", err)
    Path("own.py").write_text("import os\n" + OWN.replace("pair(24, 0)", "pair(24, int('RANK' in os.environ))"))
    err = mistake(capsys, *words, "--stages", "2", "--workers", "2")
    assert err.startswith("stretto: data own.py:data gave other examples (digest ")
    assert err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize("workers", [[], ["--workers", "2"]])
def test_data_that_differ_from_call_to_call_are_refused(capsys, workers):
    """The calls of this process count: its first one resolves the settings, others are those of the run."""
    counting = "import os, time\n" + OWN.replace("def data():\n", "def data():\n    SEED = time.time_ns() % 10**6\n")
    Path("own.py").write_text(counting.replace("pair(24, 0)", "pair(24, SEED)"))
    words = [*WORDS, *FEW, "--method", "1f1b", "--stages", "2", *workers]
    if workers:
        err = mistake(capsys, "train", *words, "--out", "run")
        assert err.count("rank 1 has other examples of data own.py:data than rank 0: digest is '") == 1
        assert "Let it return the same at each call, drawing from a generator that it seeds" in err
    else:
        run(capsys, "train", *words, "--out", "run", "--json")  # called once


def test_a_network_of_ones_own_needs_data(capsys):
    assert "data is missing: own.py:build" in mistake(capsys, "train", "--model", "own.py:build")


def test_a_plan_says_where_its_command_needs_a_rate_and_is_tried_at_any(capsys):
    Path("own.py").write_text(OWN + "\n\ndef rated(params, lr):\n    return torch.optim.SGD(params, lr=lr)\n")
    words = ["plan", *WORDS[:-2], "--cluster", "8-a100", "--workers", "1"]
    told = said(capsys, *words, "--optimizer", "own.py:rated")
    assert "--optimizer own.py:rated --lr RATE, with a rate in place of RATE" in told
    training = tomllib.loads(Path("plan.toml").read_text())["train"]
    assert take_place_and_resolve(training).lr == 0.001, "as it is priced"
    assert "RATE" not in said(capsys, *words, "--optimizer", "own.py:sgd"), "its default"
    assert take_place_and_resolve(training | {"optimizer": "own.py:sgd"}).lr == 0.05


@pytest.mark.slow
def test_plans_with_an_optimizer_that_must_be_given_a_rate(capsys):
    Path("own.py").write_text(OWN + "\n\ndef adam(params, lr):\n    return torch.optim.AdamW(params, lr=lr)\n")
    words = ["plan", *WORDS[:-2], "--cluster", "8-a100", "--workers", "2", "--json"]
    adam = json.loads(said(capsys, *words, "--optimizer", "own.py:adam"))
    usual = json.loads(said(capsys, *words, "--optimizer", "adamw"))
    assert adam["predicted"] == usual["predicted"], "it keeps as much as AdamW"


def test_plans_with_an_optimizer_that_fails(capsys):
    words = ["plan", *WORDS[:-2], "--cluster", "8-a100", "--workers", "2", "--json"]
    Path("own.py").write_text(OWN + "\n\ndef picky(params, lr):\n    return params[7]\n")
    told = mistake(capsys, *words, "--optimizer", "own.py:picky")
    assert "optimizer own.py:picky fails on a single parameter" in told
    assert "own.py:" in told


def test_a_plan_in_the_way_is_kept(capsys):
    words = ["plan", *WORDS[:-2], "--cluster", "8-a100", "--methods", "backprop"]
    assert "written to plan.toml" in said(capsys, *words, "--workers", "1")
    first = Path("plan.toml").read_text()
    assert "is kept" not in said(capsys, *words, "--workers", "1")
    assert "the former plan.toml is kept as plan.1.toml" in said(capsys, *words, "--workers", "1", "--batch-size", "48")
    assert Path("plan.1.toml").read_text() == first
    assert Path("plan.toml").read_text() != first


def test_a_head_that_raises_is_told_with_what_it_is_given(capsys):
    Path("own.py").write_text(OWN + "\n\ndef head(size):\n    return nn.Linear(size, 1)\n")
    told = mistake(capsys, "train", *WORDS, *FEW, "--method", "greedy(head=own.py:head)")
    assert "head own.py:head raised TypeError" in told
    assert "at.shape is the stage's output" in told


def test_two_metrics_of_one_name(capsys):
    told = mistake(capsys, "train", *WORDS, *FEW, "--metric", "mae=own.py:hits")
    assert "metric 'mae' is given twice: choose another name for own.py:hits" in told


def place(text):
    """The end of a message for an error at this line of own.py."""
    return f" ({Path('own.py').resolve()}:{Path('own.py').read_text().partition(text)[0].count(chr(10)) + 1})"


@pytest.mark.parametrize(
    ("line", "replaced", "message"),
    [
        ("return (output - target).abs().mean()", "return len(3)", "metric mae raised TypeError: object of type 'int'"),
        ("return torch.optim.SGD(params, lr=lr)", "return {}['sgd']", "optimizer=own.py:sgd failed with KeyError"),
        ("return ((output - target) ** 2).mean()", "return output.view(7, target)", "has a loss that fails"),
        ("WEIGHTS = 1", "WEIGHTS = ONE", "cannot import own.py: NameError"),
        (
            "return nn.Sequential(",
            "return nn.Sequential(nn.Linear(4, 4, dtype=7),",
            "own.py:build raised TypeError",  # in torch: the line of own.py that calls it is told
        ),
    ],
)
def test_errors_of_functions_name_their_line(capsys, line, replaced, message):
    Path("own.py").write_text(OWN.replace(line, replaced, 1))
    err = mistake(capsys, "train", *WORDS, *FEW, "--optimizer", "own.py:sgd", "--out", "run")
    assert message in err
    assert place(replaced) in err
    assert " at 0x" not in err
    assert err.count(".py:") == err.count("own.py:")


@pytest.mark.parametrize(
    ("layers", "where"),
    [
        ("self.table = nn.Embedding(9, 4)", "the model fails on the example in table (Embedding), aten.embedding"),
        ("self.blocks = nn.ModuleList([nn.Embedding(9, 4), nn.Tanh()])", "layer 0 (Embedding) cannot take"),
    ],
)
def test_an_id_outside_an_embedding(capsys, layers, where):
    blocks = "blocks" in layers
    Path("ids.py").write_text(f"""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}
        self.last = nn.Linear(4, 1)

    def forward(self, ids):
        return self.last(self.table(ids))


def build():
    return {"[*Net().blocks, Net().last]" if blocks else "Net()"}


def data():
    ids = torch.arange(24) % 10
    return (ids, torch.ones(24, 1)), (ids, torch.ones(24, 1))
""")
    err = mistake(capsys, "train", "--model", "ids.py:build", "--data", "ids.py:data", "--loss", "mse_loss", *FEW)
    assert where in err
    assert "index out of range in self. A value may lie outside an embedding's range" in err
    assert err.count("\n") == 1


ROWS = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.table(x))


def data():
    splits = [torch.arange(number) % 9 for number in (64, 300, 8)]
    splits[SPLIT][ROW] = 9
    return [(x, x[:, None].float()) for x in splits]
"""


@pytest.mark.parametrize(
    ("split", "row", "words", "where"),
    [
        (0, 1, [], "(in data rows.py:data, train, rows 0 to 1)"),
        (0, 7, [], "(in data rows.py:data, train, rows 0 to 7)"),
        (0, 44, [], r"\(in data rows.py:data, train, one of the rows (\d+, )*44(, \d+)*\)"),
        (0, 44, ["--method", "pb"], "(in data rows.py:data, train)"),
        (0, 44, ["--steps", "1"], "(in data rows.py:data, 512 examples of train)"),
        (1, 5, [], "data rows.py:data: validation: evaluate: the model or the loss cannot take batch 0"),
        (1, 200, [], "(in data rows.py:data, validation, in batches of 128 rows)"),
        (2, 5, [], "data rows.py:data: test: evaluate"),
    ],
)
def test_an_id_outside_an_embedding_is_told_with_its_split_and_rows(capsys, split, row, words, where):
    Path("rows.py").write_text(ROWS.replace("SPLIT", f"{split}").replace("ROW", f"{row}"))
    given = ["--model", "rows.py:Model", "--data", "rows.py:data", "--loss", "mse_loss", "--batch-size", "8"]
    steps = [] if "--steps" in words else ["--steps", "8"]
    err = mistake(capsys, "train", *given, "--lr", "0.1", "--evaluations", "1", *steps, *words)
    assert re.search(where, err) if where.startswith("\\") else where in err
    assert "Give an example of the shapes" not in err


def test_a_metric_without_a_value_ends_compare_with_2_and_keeps_what_is_finished(capsys):
    Path("bad.py").write_text("def undefined(output, target):\n    return float('nan')\n")
    words = ["compare", *WORDS, *FEW, "--metric", "bad=bad.py:undefined", "--methods", "backprop", "--seeds", "1"]
    message = mistake(capsys, *words, "--jobs", "1", "--out", "study", "--quiet")
    assert "metric bad is nan on the validation split after step" in message
    assert "return a number for every batch" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "own.py"],
            "model 'own.py' is a file: name a function in it, own.py:build, or pair, or data, or loss",
        ),
        (
            ["--metric", "mae=own.py:mae:best"],
            "metric 'mae=own.py:mae:best': write NAME=path/to/file.py:function, and :hi",
        ),
        (["--optimizer", "own.py:rated"], "optimizer own.py:rated needs a rate: give lr, as --lr 0.01"),
        (["--loss", "own.py:undefined"], "not finite after step 1: look for NaN in the data and in the loss function"),
    ],
)
def test_remedies(words, message, capsys):
    with Path("own.py").open("a") as file:
        file.write("\n\ndef rated(params, lr):\n    return torch.optim.SGD(params, lr=lr)\n")
        file.write("\n\ndef undefined(output, target):\n    return loss(output, target) * float('nan')\n")
    given = dict(zip(WORDS[::2], WORDS[1::2], strict=True)) | {words[0]: words[1]}
    status = main(["train", *(word for pair in given.items() for word in pair), "--steps", "2", "--quiet"])
    assert status == (1 if "not finite" in message else 2)
    assert re.search(message, capsys.readouterr().err)


TOKENS = """
import torch
from torch import nn
from torch.nn.functional import one_hot


class Hot(nn.Module):
    def forward(self, x):
        return one_hot(x, 5).float()


def embeds():
    return nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(24, 4), nn.Linear(4, 5))


def hot():
    return nn.Sequential(Hot(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))


def texts():
    x = torch.arange(96).view(16, 6) % 5
    return (x[:12], (x[:12] + 1) % 5), (x[12:], (x[12:] + 1) % 5)


def classes():
    return tuple((x, y[:, 0]) for x, y in texts())


def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())
"""


@pytest.mark.parametrize(
    ("words", "optimizer"),
    [
        ("--model tokens.py:hot --data tokens.py:texts", "adamw"),
        ("--model tokens.py:embeds --data tokens.py:classes", "adamw"),
        ("--model tokens.py:embeds --data tokens.py:classes --methods spectrain", "sgd"),  # which takes no other
        ("--model tokens.py:embeds --data tokens.py:classes --momentum 0.9", "sgd"),
        ("--model tokens.py:embeds --data tokens.py:classes --optimizer sgd", "sgd"),
    ],
)
def test_networks_of_tokens_take_adamw_where_nothing_else_was_asked_for(words, optimizer, capsys):
    Path("tokens.py").write_text(TOKENS)
    asked = [*words.split(), "--loss", "tokens.py:loss", "--stages", "2", "--dry-run", "--json"]
    asked += [] if "spectrain" in words else ["--methods", "backprop"]
    resolved = json.loads(said(capsys, "compare", *asked))
    assert resolved["optimizer"] == optimizer
    assert resolved["lr"] == ([0.001, 0.003, 0.01] if optimizer == "adamw" else [0.003, 0.01, 0.03, 0.1])


def test_a_loss_that_is_no_mean_is_refused_before_a_method_cuts_with_it(capsys):
    told = "@stretto.mean\ndef told(output, target):\n    return uneven(output, target)\n"
    Path("bad.py").write_text(f"import stretto\n{UNEVEN}\n\n{told}")
    cut = ["--model", "own.py:build", "--data", "own.py:data", "--loss"]
    simulate = ["simulate", *cut, "bad.py:uneven", "--stages", "2", "--method"]
    where = ["--cluster", "8-a100", "--workers", "2", "--all-workers"]
    plan = ["plan", *cut, "bad.py:uneven", *where, "--methods", "1f1b", "--microbatches", "2"]
    for words in ([*simulate, "1f1b"], plan):
        told = mistake(capsys, *words)
        assert "the loss is not a mean over examples: " in told
        assert "or @stretto.mean above the function" in told
    assert "--microbatches 1 --data-parallel 1" in told
    assert main([*simulate, "backprop"]) == 0
    assert main([*plan[:-1], "1", "--data-parallel", "1", "--tensor", "1"]) == 0
    declared = [word.replace("uneven", "told") for word in plan]
    assert main(declared) == 0
    assert "or write" in mistake(capsys, *cut[:0], "train", *cut, "stretto.losses.token_cross_entropy")


def test_doctor_says_what_is_missing(capsys):
    Path("dicts.py").write_text(
        "import torch\n\n\ndef data():\n    x = torch.ones(24, 4)\n    return (x, {'y': x}), (x, {'y': x})\n"
    )
    assert main(["doctor", "--model", "own.py:build", "--data", "dicts.py:data"]) == 0
    assert "mind: training (dicts.py:data) needs one thing more: loss is missing" in capsys.readouterr().out


def test_doctor_tries_the_users_functions(capsys):
    words = ["doctor", *WORDS, "--optimizer", "own.py:sgd"]
    assert main(words) == 0
    assert "every method's weights can be guaranteed" in capsys.readouterr().out
    Path("bad.py").write_text("def vector(output, target):\n    return output - target\n\n\n" + UNEVEN)
    with pytest.warns(match="evaluation: the loss is no mean over examples"):
        assert main([*words[:5], "--loss", "bad.py:uneven"]) == 1
    told = capsys.readouterr().out
    assert "train refuses replicas, and methods that cut a minibatch (gpipe, 1f1b, " in told
    assert "paci): the loss is not a mean over examples: " in told
    assert told.endswith("weights can be guaranteed, but not every method takes the loss\n")
    assert "the loss returned a tensor" in mistake(capsys, *words[:5], "--loss", "bad.py:vector")
    assert "metric bad returned Tensor" in mistake(capsys, *words, "--metric", "bad=bad.py:vector")
    assert "give --model and --data, too" in mistake(capsys, "doctor", "--loss", "own.py:loss")
