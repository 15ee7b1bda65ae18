"""Checkpoints with right sums that nobody can have saved: UsageError with the path, and nothing is loaded."""

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import stretto


def make():
    torch.manual_seed(0)
    stages = [nn.Linear(3, 4), nn.Linear(4, 2)]
    return stretto.Trainer(
        stages, nn.functional.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "pb-lwpw",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2), device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint after three steps."""
    trainer, place = make(), tmp_path_factory.mktemp("saved") / "run"
    for _ in range(3):
        trainer.step(torch.randn(4, 3), torch.randint(2, (4,)))
    trainer.save(place, {"note": 1})
    return place


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it, to be forged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def crc(content):
    return f"{zlib.crc32(content):08x}"


def seal(run, change=lambda content: None):
    """Change the manifest, and give it and the files the sums that are right."""
    file = run / "manifest.json"
    content = json.loads(file.read_bytes())
    content["stages"] = [
        {each.name: [each.stat().st_size, crc(each.read_bytes())] for each in sorted((run / f"stage-{s}").iterdir())}
        for s in range(2)
    ]
    change(content)
    del content["crc32"]
    file.write_text(json.dumps({**content, "crc32": crc(json.dumps(content, sort_keys=True).encode())}))


def refused(run, message):
    """Load it into a trainer, which goes on as one that has not tried."""
    trainer, other = make(), make()
    with pytest.raises(stretto.UsageError, match=f"(?s){run}.*{message}"):
        trainer.load(run)
    x, y = torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    for each in (trainer, other):
        each.step(x, y)
        each.flush()
    for mine, theirs in zip(trainer.gather().values(), other.gather().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_stages", 3), ("num_stages", None), ("stages", 5), ("stages", ["x", "y"]), ("entered", "x"),
        ("entered", -1), ("entered", 1e30), ("parts", 0), ("parts", True), ("losses", {"x": []}),
        ("losses", {"1": ["x"]}), ("losses", []), ("extra", {"dict": [[1]]}), ("extra", {"nothing": 1}), ("extra", [1]),
        ("seed", None), ("unknown", 1), ("replicas", 0), ("replicas", None), ("sync", 3),
        ("stages", [{"a": [1]}, {"a": [1, 2, 3]}]),
    ],
)  # fmt: skip
def test_a_manifest_of_other_kinds(field, value, run):
    seal(run, lambda content: content.__setitem__(field, value))
    refused(run, "manifest.json was not written by Stretto")


def test_more_minibatches_than_updates(run):
    seal(run, lambda content: content.__setitem__("entered", 1003))
    refused(run, "stage 0 has made 3 updates in 1003 minibatches")


def test_lists_in_each_other(run):
    (run / "manifest.json").write_text("[" * 100_000 + "]" * 100_000)
    refused(run, "is damaged: RecursionError")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((), "x", "is no state of a stage"), (("module",), 5, "module of stage 0"),
        (("optimizer",), "x", "optimizer of stage 0"),
        (("optimizer", "param_groups"), "x", "param_groups is a str, expected a list"),
        (("optimizer", "param_groups", 0), "x", "param_groups.0 is a str"),
        (("optimizer", "param_groups", 0, "lr"), "x", "param_groups.0.lr is a str"),
        (("optimizer", "param_groups", 0, "nesterov"), 3, "nesterov is a int, expected a bool"),
        (("optimizer", "state", 0), [1], "state.0 is a list"),
        (("optimizer", "state", 0, "momentum_buffer"), "x", "momentum_buffer is 'x'"),
        (("optimizer", "state", 0, "momentum_buffer"), 3, "momentum_buffer is 3"),
        (("scheduler",), [1], "scheduler of stage 0"), (("scheduler", "last_epoch"), "x", "last_epoch is a str"),
        (("updates",), "x", "made 'x' updates in 3"), (("updates",), -1, "made -1 updates"),
        (("updates",), None, "made None"),
        (("weights",), 5, "weights is a int"), (("weights", "forward", "updates"), "x", "updates is a str"),
        (("weights", "forward", "former"), [1], "former is a list"),
        (("weights", "forward", "former", "weight"), 1, "former.weight is a int"),
    ],
    ids=str,
)  # fmt: skip
def test_a_state_of_other_kinds(path, value, message, run):
    file = run / "stage-0" / "state.json"
    tree = json.loads(file.read_bytes())
    place = [tree]
    for key in path:
        at = place[-1]
        if isinstance(at, list):
            place.append(at[key])
        else:
            (pair,) = [pair for pair in at["dict"] if pair[0] == key]
            place.append(pair[1])
    if not path:
        tree = value
    elif isinstance(place[-2], list):
        place[-2][path[-1]] = value
    else:
        (pair,) = [pair for pair in place[-2]["dict"] if pair[0] == path[-1]]
        pair[1] = value
    file.write_text(json.dumps(tree))
    seal(run)
    refused(run, message)


def test_tensors_of_another_shape_in_an_optimizer(run):
    """torch's `load_state_dict` takes them, and the next step fails or, worse, broadcasts."""
    trainer = make()
    trainer.load(run)
    state = trainer._stages[0].optimizer.state
    for each in state.values():
        each["momentum_buffer"] = each["momentum_buffer"][:1].clone()
    trainer.save(run)
    refused(run, r"state.0.momentum_buffer is of shape \[1, 3\], expected \[4, 3\]")


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_an_optimizer_without_an_option(option, run):
    file = run / "stage-0" / "state.json"
    file.write_text(file.read_text().replace(f'"{option}"', '"other"'))
    seal(run)
    refused(run, f"optimizer.param_groups has no {option}")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json", "manifest.json"])
def test_a_pipe_is_not_waited_for(name, run):
    file = run / ("" if name == "manifest.json" else "stage-0") / name
    file.unlink()
    os.mkfifo(file)
    refused(run, f"{name} is damaged: it is no regular file")


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pickle_that_runs_code_does_not_run_it(name, run, tmp_path, capfd):
    (run / "stage-0" / name).write_bytes(pickle.dumps(Evil(tmp_path / "was here")))
    seal(run)
    refused(run, "cannot be read")
    assert not (tmp_path / "was here").exists()
    assert name != ".metadata" or capfd.readouterr().err == ""
