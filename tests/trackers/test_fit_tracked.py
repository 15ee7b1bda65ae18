"""What `fit` logs: losses under their own steps, rates, norms against plain PyTorch, and one run after a crash."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import stretto
from stretto.trackers import CSV

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X[:, 0] > 0).long()
LOG = CSV(every=4)


def build(method="backprop", **options):
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 2)]
    return stretto.Trainer(
        [layer.double() for layer in layers], nn.functional.cross_entropy,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5), method, **options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(folder="logs"):
    (file,) = Path(folder).glob("*/metrics.csv")
    with file.open(newline="") as opened:
        return {int(row["step"]): {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(opened)}


@pytest.mark.parametrize("method", ["backprop", "1f1b(microbatches=2)", "pb", "greedy", "pipedream"])
def test_losses_and_entries_stand_under_their_own_steps(method):
    history = build(method).fit((X, Y), validation=(X, Y), epochs=3, batch_size=8, log=LOG, quiet=True)
    rows = table()
    assert [rows[step]["loss"] for step in range(1, 19)] == history.steps
    for entry in history.entries:
        row = rows[entry["step"]]
        assert {key: row[key] for key in entry} == entry
    assert [step for step, row in rows.items() if "lr" in row] == [1, 4, 8, 12, 16]
    assert all(rows[step]["lr"] == 0.1 for step in (1, 4, 16))
    assert all(row["examples_per_second"] > 0 for row in rows.values())
    assert rows[4]["peak_memory_bytes"] > 1e6
    (folder,) = Path("logs").iterdir()
    assert json.loads((folder / "settings.json").read_text())["method"] == str(stretto.method(method))
    assert "worker 0  0F0" in (folder / "schedule.txt").read_text()


def test_a_method_in_a_file_is_logged_under_its_words(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import stretto\ndef laid(num_stages, num_workers):\n"
        "    return stretto.method('gpipe').plan(num_stages, num_workers)[0]\n"
    )
    history = build("mine.py:laid").fit((X, Y), epochs=1, batch_size=8, log=LOG, quiet=True)
    assert [row["loss"] for row in table().values()] == history.steps
    assert [folder.name.startswith("fit-mine-py-laid-") for folder in Path("logs").iterdir()] == [True]


def test_the_norm_of_gradients_is_that_of_plain_training():
    """The same batches, by a loop that shares nothing with the library but the order of the examples."""
    order = []
    trainer = build()
    step = trainer.step
    trainer.step = lambda x, y: order.append((x, y)) or step(x, y)
    model = build().model
    trainer.fit((X, Y), steps=9, batch_size=8, log=LOG, quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    norms = []
    for x, y in order:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))
        optimizer.step()
    rows = table()
    for number in (1, 4, 8):
        assert rows[number]["grad_norm"] == pytest.approx(norms[number - 1], rel=1e-12)


def test_logging_changes_no_number():
    plain, tracked = build("pb"), build("pb")
    wanted = plain.fit((X, Y), epochs=2, batch_size=8, quiet=True)
    history = tracked.fit((X, Y), epochs=2, batch_size=8, log=LOG, quiet=True)
    assert history.steps == wanted.steps
    assert all(map(torch.equal, tracked.model.parameters(), plain.model.parameters()))
    assert plain.grad_norm is None
    assert tracked.grad_norm > 0


def test_rates_that_differ_are_told_by_stage():
    rates = iter((0.1, 0.2, 0.3))
    trainer = stretto.Trainer(
        [nn.Linear(6, 6).double(), nn.Linear(6, 6).double(), nn.Linear(6, 2).double()],
        nn.functional.cross_entropy, lambda params: torch.optim.SGD(params, lr=next(rates)),
    )  # fmt: skip
    trainer.fit((X, Y), steps=1, log=LOG, quiet=True)
    assert {key: value for key, value in table()[1].items() if "lr" in key} == {
        "lr/stage_0": 0.1, "lr/stage_1": 0.2, "lr/stage_2": 0.3,
    }  # fmt: skip


@pytest.mark.parametrize("method", ["backprop", "pb"])
def test_after_a_crash_the_run_goes_on_in_the_same_place(method):
    options = {"validation": (X, Y), "epochs": 3, "batch_size": 8, "quiet": True}
    whole = build(method).fit((X, Y), **options, checkpoint="undisturbed")

    def crash(trainer, entry):
        if entry["epoch"] == 2:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        build(method).fit((X, Y), **options, checkpoint="saved", log=LOG, callbacks=[crash])
    history = build(method).fit((X, Y), **options, checkpoint="saved", log=LOG)
    assert history.steps == whole.steps
    rows = table()  # there is one folder
    assert [rows[step]["loss"] for step in sorted(rows)] == whole.steps
    assert rows[18]["validation_loss"] == whole.validation_loss[-1]


def test_a_tracker_that_fails_is_a_warning(monkeypatch):
    monkeypatch.setattr("stretto.trackers.csv_files.CSVRun.write", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match=r"tracker csv failed \(ZeroDivisionError") as caught:
        history = build().fit((X, Y), epochs=2, batch_size=8, log=LOG, quiet=True)
    assert len(caught) == 1
    assert len(history.steps) == 12


def test_several_trackers_and_a_function_of_each_step():
    told = []
    build().fit((X, Y), steps=2, log=told.append, quiet=True)
    assert [each["step"] for each in told] == [1, 2]
    with pytest.raises(stretto.UsageError, match=r"fit: log.*or a function of a dict"):
        build().fit((X, Y), steps=2, log=3)


def test_a_rate_of_zero_is_one_and_norms_are_no_longer_measured_afterwards():
    layers = [nn.Linear(6, 6).double(), nn.Linear(6, 2).double()]
    trainer = stretto.Trainer(
        layers, nn.functional.cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0)),
    )  # fmt: skip
    trainer.fit((X, Y), steps=4, batch_size=8, log=LOG, quiet=True)
    assert table()[4]["lr"] == 0.0
    norm = trainer.grad_norm
    trainer.step(X, Y)
    assert trainer.grad_norm == norm, "of the last update that was measured"


def test_two_calls_in_one_second_have_two_runs():
    for _ in range(2):
        build().fit((X, Y), steps=2, log=LOG, quiet=True)
    assert len(list(Path("logs").iterdir())) == 2
