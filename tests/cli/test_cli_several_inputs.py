"""Batches that are tuples and dicts, as padding masks make them, through every command that takes a network."""

from pathlib import Path

import pytest

from stretto.cli import main

OWN = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens, mask):
        x = self.hidden(self.embed(tokens)).tanh().masked_fill(mask[..., None], 0.0)
        return self.out(x.mean(1))


class Two(Masked):
    def forward(self, tokens, mask):
        return {"scores": super().forward(tokens, mask)}


def layers():
    return [Masked(), nn.Linear(3, 3)]


def part(count):
    draw = torch.Generator().manual_seed(count)
    tokens, mask = torch.randint(9, (count, 6), generator=draw), torch.zeros(count, 6, dtype=torch.bool)
    return tokens, mask, torch.randint(3, (count,), generator=draw)


def dicts():
    return [({"mask": mask, "tokens": tokens}, y) for tokens, mask, y in map(part, (16, 8))]


def tuples():
    return [((tokens, mask), y) for tokens, mask, y in map(part, (16, 8))]


def targets():
    return [({"tokens": tokens, "mask": mask}, {"label": y, "mask": mask}) for tokens, mask, y in map(part, (16, 8))]


def nested():
    return [({"tokens": (tokens, mask)}, y) for tokens, mask, y in map(part, (16, 8))]


def loss(output, y):
    label = y["label"] if isinstance(y, dict) else y
    output = output["scores"] if isinstance(output, dict) else output
    return nn.functional.cross_entropy(output, label)


def head(site):
    return nn.Sequential(nn.Flatten(), nn.Linear(site.shape[1:].numel(), site.classes))
"""
HEAD = "greedy(head=own.py:head)"
PRICED = ["simulate", "--stages", "2", "--cluster", "8-a100"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, plain_pages):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)


def own(data, model="Masked"):
    return ["--model", f"own.py:{model}", "--data", f"own.py:{data}", "--loss", "own.py:loss"]


@pytest.mark.parametrize("data", ["dicts", "targets"])
def test_stages_of_them_are_priced(data, capsys):
    """As the report of a traced run prices them, too."""
    assert main([*PRICED, *own(data), "--method", HEAD]) == 0, capsys.readouterr().err


def test_outputs_that_are_dicts_are_priced_where_they_are_trained(capsys):
    planned = ["plan", "--cluster", "8-a100", "--workers", "2", "--all-workers", "--methods"]
    for words in ([*PRICED, "--method", "1f1b"], [*planned, "pb"]):
        assert main([*words, *own("targets", "Two")]) == 0, capsys.readouterr().err
    assert main([*planned, HEAD, *own("targets", "Two")]) == 2
    assert "the model returns dict: give a tensor or a tuple of tensors" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("data", ["dicts", "targets", "tuples"])
def test_every_command_takes_them(data, capsys):
    for words in (
        [
            "train",
            "--stages",
            "2",
            "--method",
            HEAD,
            "--steps",
            "2",
            "--evaluations",
            "2",
            "--trace",
            "t.json",
            "--out",
            "run",
        ],
        [*PRICED, "--method", "synthetic-gradients"],
        ["plan", "--cluster", "8-a100", "--workers", "2", "--methods", f"{HEAD},backprop", "--out", "plan.toml"],
    ):
        assert main([*words, *own(data)]) == 0, capsys.readouterr().err
    trusted = [*own(data), "--method", HEAD]
    assert main(["report", "run", *trusted]) == 0, capsys.readouterr().err
    assert main(["inspect", "run", *trusted]) == 0, capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["train", "--stages", "2"], [*PRICED, "--method", "pb"], ["plan", "--cluster", "8-a100"]]
)
def test_others_are_refused_in_one_line_without_their_numbers(words, capsys):
    for data, model, message in (
        ("nested", "Masked", "example['tokens'] is (Tensor [16, 6] of torch.int64, "),
        ("dicts", "layers", "example names mask, tokens, but a list of layers knows no names: give a tuple instead"),
    ):
        assert main([*words, *own(data, model)]) == 2
        told = capsys.readouterr().err
        assert message.replace("16", "2") in told or message in told
        assert "tensor(" not in told
        assert told.count("\n") == 1
