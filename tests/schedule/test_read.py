"""Schedules from files: written and read again, trained to the same bits, and mistakes with their line."""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from pairwise import in_turn
from stretto import UsageError
from stretto.cli import main
from stretto.schedule import read_csv, to_csv
from stretto.simulate import simulate

SYNCHRONOUS = ["backprop", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(method, *, clip=None):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)]
    trainer = stretto.Trainer([*layers, nn.Linear(5, 3)], cross_entropy, sgd, method, clip=clip)
    losses = [trainer.step(torch.randn(9, 5), torch.randint(3, (9,))) for _ in range(3)]
    return losses, trainer


@pytest.mark.parametrize(("name", "clip"), in_turn(SYNCHRONOUS, [0.1, None], rounds=2, slow=1))
def test_a_schedule_written_and_read_is_the_same_training(name, clip, tmp_path):
    """To the bit, with clipping too; and the same time on paper."""
    schedule, rules = stretto.method(name).plan(4)
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(schedule))
    assert to_csv(read_csv(file)) == to_csv(schedule)
    listed = stretto.method("csv", path=str(file))
    again, same_rules = listed.plan(4)
    assert simulate(again, same_rules, 1).makespan == simulate(schedule, rules, 1).makespan
    (one, plain), (other, read) = trained(name, clip=clip), trained(listed, clip=clip)
    assert one == other
    for a, b in zip(plain.model.state_dict().values(), read.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_pauses_updates_and_recomputes_are_read(tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("\ufeff0F0, ,0C0,0B0,,0U0\r\n,1F0,1B0,1U0,1R0\r\n")
    assert [[str(a) for a in row] for row in read_csv(file).body] == [
        ["0F0", "0C0", "0B0", "0U0"],
        ["1F0", "1B0", "1U0"],
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no actions"),
        ("0F0,0B0\n\n1F0,1B0", "line 2: a worker without actions"),
        ("0F0,0B0\n1F0,1X0", r"line 2, column 2: '1X0' is no action"),
        ("0F0,0SEND_F0", r"line 1, column 2: '0SEND_F0' is no action of a stage"),
        ("0F0,0A0,0B0", r"line 1, column 2: '0A0': leave it out, Trainer\(mesh=...\) adds it"),
        ("0F0,0B0\n1F0", "line 2: 1B0 is missing from worker 1"),
        ("0F0,0B0,0F0", "line 1: worker 0: 0F0 stands twice"),
        ("0F0,0B0\n0F1,0B1", "line 1: stage 0 stands on worker 0 and on worker 1"),
        ("0F0,0B0\n2F0,2B0", "stages must be 0, 1, 2, ... without gaps"),
        ("0F0,0B0,0F2,0B2", "line 1: 0F1 is missing"),
        ("0B0,0F0", "deadlock|waits for"),
        ("0F0,0F1,0B1,0B0\n1B0,1F0,1F1,1B1", "line 1: deadlock with buffered sends: worker 0 waits"),
        ("0F0,0I0,0B0,0W0", "no place in this schedule"),
        ('0F0,"0B0', "no text in comma-separated columns"),
    ],
)
def test_mistakes_have_their_line(text, said, tmp_path):
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=said) as error:
        read_csv(file)
    assert str(file) in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_csv(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="no text in comma-separated columns"):
        read_csv(tmp_path / "binary.csv")
    with pytest.raises(UsageError, match="which file"):
        stretto.method("csv")


def test_a_file_is_for_its_stages_and_its_content(tmp_path):
    """Another content is another run: a checkpoint does not go on with it."""
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(stretto.method("1f1b(microbatches=3)").plan(4)[0]))
    method = stretto.method(f"csv(path={file})")
    assert stretto.method(str(method)).options == method.options
    with pytest.raises(UsageError, match="is for 4 stages on 4 workers, but there are 2 stages"):
        stretto.Trainer([nn.Linear(5, 5), nn.Linear(5, 3)], cross_entropy, sgd, method)
    _, trainer = trained(method)
    trainer.save(tmp_path / "saved")
    file.write_text(to_csv(stretto.method("gpipe(microbatches=3)").plan(4)[0]))
    with pytest.raises(UsageError, match=r"has the digest [0-9a-f]{12}, not [0-9a-f]{12}"):
        stretto.method(str(method))
    _, changed = trained(f"csv(path={file})")
    with pytest.raises(UsageError, match="was saved with method csv"):
        changed.load(tmp_path / "saved")


def test_on_the_command_line(tmp_path, capsys):
    """`show` draws it, `simulate` times it, and it trains on processes as it is emulated."""
    file = tmp_path / "mine.csv"
    assert main(["show", "1f1b", "--stages", "2", "--microbatches", "3", "--csv", str(file)]) == 0
    capsys.readouterr()
    assert main(["show", "--from", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["stages"], shown["microbatches"]) == (2, 3)
    again = tmp_path / "again.csv"
    assert main(["show", "--from", str(file), "--csv", str(again)]) == 0
    assert again.read_text() == file.read_text()
    capsys.readouterr()
    assert main(["simulate", "--method", f"csv(path={file})", "--stages", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["minibatches"] == 2  # four micro-batches or more, three in each
    told = []
    for options in (["--method", f"csv(path={file})"], ["--method", f"csv(path={file})", "--workers", "2"]):
        out = tmp_path / f"run-{len(told)}"
        words = ["train", "--model", "mlp", "--model-options.depth", "2", "--stages", "2", "--steps", "3", *options]
        assert main([*words, "--batch-size", "30", "--out", str(out), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["train_loss"] == told[1]["train_loss"]
    file.write_text("0F0,0B0\n1F0,1X0\n")
    assert main(["show", "--from", str(file)]) == 2
    assert f"{file}, line 2, column 2" in capsys.readouterr().err
