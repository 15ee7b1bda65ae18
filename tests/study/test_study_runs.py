"""Studies on the disk: what is finished stays, what is half written is nobody's result, same seed same numbers."""

import errno
import json
import math
import multiprocessing
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from stretto import UsageError
from stretto.cost import find_cluster
from stretto.measure.energy import EnergyMeter
from stretto.nn import devices
from stretto.nn.chain import Chain
from stretto.report.frontier import PNG, SVG
from stretto.report.record import several_devices
from stretto.settings.runs import CompareSettings, TrainSettings
from stretto.study import (
    compare,
    open_study,
    read_study,
    report_page,
    resolve_study,
    run,
    run_processes,
    store,
    study,
    training_run,
    write_report,
)
from stretto.study.checkpoints import Progress
from stretto.study.evaluation import evaluation_steps
from stretto.study.prepare import prepare, resolve
from stretto.study.single_run import claim, default_folder, summary
from stretto.study.store import FullDiskError, locked
from stretto.study.study import notes_on
from stretto.system import fork_server
from stretto.trainer.trainer import Trainer

SETTINGS = CompareSettings(
    model_options={"depth": 3, "width": 8},
    steps=12,
    evaluations=3,
    methods=("backprop", "overlapping"),
    lr=(0.05, 0.1),
    batch_size=(32,),
    seeds=1,
)
SINGLE = TrainSettings(model_options={"depth": 2, "width": 8}, steps=8, evaluations=2, batch_size=32, method="greedy")
EVERYTHING = {
    "backprop-lr0.05-b32-s0",
    "overlapping-lr0.05-b32-s0",
    "backprop-lr0.1-b32-s0",
    "overlapping-lr0.1-b32-s0",
}


def made(out, settings=SETTINGS, **options):
    return compare(open_study(settings, out), jobs=options.pop("jobs", 1), **options)


def numbers(out):
    """All that a study has written, without what was measured of the machine."""

    def timeless(value):
        if isinstance(value, dict):
            measured = {key for key in value if "seconds" in key or key in ("joules", "peak_memory")}
            return {key: timeless(each) for key, each in value.items() if key not in measured}
        return [timeless(each) for each in value] if isinstance(value, list) else value

    files = {}
    for path in sorted(out.glob("runs/*/*")):
        lines = path.read_bytes()
        if path.suffix == ".json":
            lines = timeless(json.loads(lines))
        elif path.suffix == ".jsonl":
            lines = [timeless(json.loads(line)) for line in lines.splitlines()]
        files[str(path.relative_to(out))] = lines
    return files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("studies") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.report.frontier.pictures", lambda _: {SVG: b"<svg/>", PNG: b""})  # drawn elsewhere
        outcome = made(out)
    assert outcome.failures == ()
    return out


def test_what_a_study_leaves(whole):
    assert {path.name for path in whole.iterdir()} == {
        "study.json", "report.html", SVG, PNG, "runs", ".lock"}  # fmt: skip
    assert {path.name for path in (whole / "runs").iterdir()} == EVERYTHING
    for folder in (whole / "runs").iterdir():
        assert {path.name for path in folder.iterdir()} == {"run.json", "events.jsonl", "model.safetensors"}
        content = json.loads((folder / "run.json").read_text())
        assert content["settings"]["seed"] == 0
        assert content["settings"]["steps"] == 12
        assert {"torch", "python", "stretto"} <= content["versions"].keys()
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        kinds = [event["event"] for event in events]
        assert [kind for kind in kinds if kind != "observation"] == ["start", *["evaluation"] * 3, "finished"]
        assert "observation" in kinds


@pytest.mark.usefixtures("plain_pages")
def test_same_seed_same_numbers_however_many_processes(whole, tmp_path):
    made(tmp_path / "two", jobs=2)
    assert numbers(tmp_path / "two") == numbers(whole)


@pytest.mark.usefixtures("plain_pages")
def test_the_json_object(whole):
    outcome = made(whole)
    content = json.loads(json.dumps(outcome.to_json(), allow_nan=False))
    assert set(content) == {"runs", "frontier", "failed", "not_tried", "report", "left_out"}
    assert content["left_out"] == {}
    assert content["failed"] == []
    wanted = ("method", "seed", "options", "train_loss", "test_loss", "test_accuracy", "total_flops", "serial_flops",
              "seconds")  # fmt: skip
    for each in content["runs"]:
        assert set(wanted) <= set(each)
        assert 0 <= each["train_accuracy"] <= 1
        assert each["options"] == {"lr": each["options"]["lr"], "batch_size": 32}


SLOW_STEPS = [pytest.param(step, marks=pytest.mark.slow) for step in (1, 12, 30, 47)]


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize("step", [13, *SLOW_STEPS])
def test_an_interrupted_study_goes_on_where_it_stopped(whole, tmp_path, step):
    out, done = tmp_path / "study", 0

    def interrupt(steps):
        nonlocal done
        done += steps
        if done >= step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(out, on_steps=interrupt)
    study = open_study(SETTINGS, out)
    pending = study.pending
    finished = [task for task in study.tasks if task not in pending]
    assert len(finished) <= step // 12
    kept = {task.folder: task.folder.stat().st_mtime_ns for task in finished}
    repeated = []
    made(out, on_run=repeated.append)
    assert repeated == pending
    assert kept == {folder: folder.stat().st_mtime_ns for folder in kept}
    assert numbers(out) == numbers(whole)
    assert {path.name for path in (out / "runs").iterdir()} == EVERYTHING


def truncate(path):
    path.write_bytes(path.read_bytes()[:-40])


def drop_a_line(path):
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))


DAMAGES = [
    ("run.json", truncate),
    ("run.json", lambda path: path.unlink()),
    ("run.json", lambda path: path.write_text("[]")),
    ("events.jsonl", truncate),
    ("events.jsonl", drop_a_line),
    ("events.jsonl", lambda path: path.write_text("")),
]
SLOW_DAMAGES = [pytest.param(*each, marks=pytest.mark.slow) for each in DAMAGES if each[1] is not drop_a_line]


def with_a_damaged_run(whole, out, file, damage):
    """A copy of a study, and the folder of the run whose file has been damaged there."""
    shutil.copytree(whole, out)
    damaged = out / "runs" / "overlapping-lr0.05-b32-s0"
    damage(damaged / file)
    return damaged


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_run_is_not_finished(whole, tmp_path, file, damage):
    damaged = with_a_damaged_run(whole, tmp_path / "study", file, damage)
    with pytest.raises(UsageError, match=r"overlapping-lr0\.05-b32-s0 is damaged .* only this run is repeated"):
        store.read_run(damaged)
    study = read_study(tmp_path / "study")
    assert [task.folder for task in study.pending] == [damaged]
    assert len(study.records()) == 3


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize(("file", "damage"), [DAMAGES[4], *SLOW_DAMAGES])
def test_a_damaged_run_is_made_again(whole, tmp_path, file, damage):
    out = tmp_path / "study"
    with_a_damaged_run(whole, out, file, damage)
    made(out)
    assert numbers(out) == numbers(whole)


@pytest.mark.usefixtures("plain_pages")
def test_a_full_disk_ends_the_study_and_keeps_what_is_finished(whole, tmp_path, monkeypatch):
    out, saves = tmp_path / "study", 0
    save = store.replace_into

    def no_room(*arguments):
        nonlocal saves
        saves += 1
        if saves == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments)

    monkeypatch.setattr(store, "replace_into", no_room)
    with pytest.raises(FullDiskError, match=r"no room on the disk for .*/backprop-lr0\.1-b32-s0: free some"):
        made(out)
    assert len(open_study(SETTINGS, out).pending) == 2
    assert len(list((out / "runs").iterdir())) == 2  # the half-written one has given its room back
    made(out)
    assert numbers(out) == numbers(whole)


def test_a_full_disk_while_events_are_written(tmp_path, monkeypatch):
    def no_room(self, kind, **_):
        if kind == "evaluation":
            with store.writing(self.folder):
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.RunWriter, "event", no_room)
    with pytest.raises(FullDiskError):
        made(tmp_path / "study")
    assert list((tmp_path / "study" / "runs").iterdir()) == []


def test_a_full_disk_while_the_report_is_written(whole, monkeypatch):
    def no_room(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report_page, "build", no_room)
    with pytest.raises(FullDiskError, match="finished runs are kept"):
        write_report(read_study(whole))


def test_too_little_room_is_found_out_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FREE_BYTES", 2**80)
    with pytest.raises(FullDiskError, match=r"study has .* free, a study needs"):
        made(tmp_path / "study")


PATIENT = """
import time
from pathlib import Path

import torch


class Patient(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        until = time.monotonic() + 120
        while self.steps > 1 and not Path(__file__).with_name("go").exists() and time.monotonic() < until:
            time.sleep(0.01)
        return super().step(closure)


def patient(parameters, lr):
    return Patient(parameters, lr=lr)
"""


@pytest.mark.usefixtures("plain_pages")
def test_a_process_that_dies_costs_one_run(tmp_path):
    out, killed = tmp_path / "study", []
    (tmp_path / "own.py").write_text(PATIENT)

    def kill(steps):
        """One of two, each of which waits in its second step at most, or has not begun yet."""
        if not killed and steps:
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()
            (tmp_path / "go").touch()

    two = replace(SETTINGS, methods=("backprop",), optimizer=f"{tmp_path}/own.py:patient")
    advanced = []
    outcome = made(out, two, jobs=2, on_steps=lambda steps: (advanced.append(steps), kill(steps)))
    (failure,) = outcome.failures
    assert "was ended by signal SIGKILL; the machine may be short of memory: try fewer --jobs" in failure.reason
    assert f"id {killed[0].pid}" in failure.reason
    assert len(outcome.records) == 1
    assert sum(advanced) == 2 * 12
    assert multiprocessing.active_children() == []
    repaired = made(out, two)
    assert repaired.failures == ()
    assert len(repaired.records) == 2


@pytest.mark.usefixtures("plain_pages")
def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    original, out, two = run_processes.make_run, tmp_path / "study", replace(SETTINGS, methods=("backprop",))

    def breaks(task, on_step):
        if task.settings.id == "backprop-lr0.05-b32-s0":
            raise RuntimeError("out of luck")
        return original(task, on_step)

    advanced = []
    with monkeypatch.context() as patched:
        patched.setattr(run_processes, "make_run", breaks)
        outcome = made(out, two, on_steps=advanced.append)
    (failure,) = outcome.failures
    story = out / "runs" / "backprop-lr0.05-b32-s0.failed.txt"
    assert failure.reason == f"RuntimeError: out of luck (more in {story})"
    assert "Traceback" in story.read_text()
    assert outcome.to_json()["failed"] == ["backprop-lr0.05-b32-s0"]
    assert sum(advanced) == 2 * 12
    assert [record.id for record in outcome.records] == ["backprop-lr0.1-b32-s0"]
    assert made(out, two).failures == ()
    assert not story.exists()


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize(
    ("failing", "same", "failed", "untried"),
    [((0, 1, 2, 3, 4), True, 3, 3), ((0, 1, 2, 3, 4), False, 5, 0), ((1, 2, 3, 4), True, 4, 0), ((0, 1), True, 2, 0)],
)
def test_when_the_first_runs_fail_alike_the_others_are_not_tried(tmp_path, monkeypatch, failing, same, failed, untried):
    original, begun = run_processes.make_run, []

    def breaks(task, on_step):
        begun.append(task.settings.id)
        if len(begun) - 1 in failing:
            raise RuntimeError("out of luck" if same else task.settings.id)
        return original(task, on_step)

    monkeypatch.setattr(run_processes, "make_run", breaks)
    outcome = made(tmp_path / "study", replace(SETTINGS, steps=3, evaluations=1, lr=(0.01, 0.02, 0.03)))
    assert (len(outcome.failures), len(outcome.not_tried), len(outcome.records)) == (
        failed, untried, 6 - failed - untried)  # fmt: skip
    assert len(begun) == 6 - untried
    if untried:
        assert set(outcome.to_json()["not_tried"]).isdisjoint(begun)
        (complaint,) = outcome.complaints
        assert complaint.startswith("the first 3 runs failed alike, and the other 3 were not tried: RuntimeError: out")
    else:
        assert len(outcome.complaints) == failed


@pytest.mark.usefixtures("plain_pages")
def test_a_study_with_a_finished_run_tries_all_others(tmp_path, monkeypatch):
    many = replace(SETTINGS, steps=3, evaluations=1, lr=(0.01, 0.02, 0.03))
    opened = open_study(many, tmp_path / "study")
    run(opened.tasks[-1].settings, opened.tasks[-1].folder)
    store.write_json(opened.out / "study.json", {"settings": opened.settings.to_json()})
    monkeypatch.setattr(run_processes, "make_run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of luck")))
    assert len(made(tmp_path / "study", many).failures) == 5


def test_processes_give_up_too(tmp_path):
    study = open_study(replace(SETTINGS, lr=tuple(0.01 * k for k in range(1, 7))), tmp_path / "study")
    tasks = iter(replace(task, settings=replace(task.settings, data="nothing")) for task in study.tasks)
    failures = run_processes.run_all(partial(next, tasks, None), 2, lambda _: None, lambda _: None, gives_up=True)
    assert 3 <= len(failures) <= 4
    assert len(list(tasks)) == 12 - len(failures)


LOSS = """
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight.detach()))

    def forward(self, output, target):
        return nn.functional.cross_entropy(self.scale * output, target, reduction="none").mean()

loss = Scaled()
"""


def test_each_run_trains_a_loss_of_its_own(tmp_path):
    (tmp_path / "own_loss.py").write_text(LOSS)
    settings = resolve(replace(SINGLE, method="1f1b", stages=2, loss=f"{tmp_path / 'own_loss.py'}:loss"))
    first, second = prepare(settings), prepare(settings)
    (held,), (fresh,) = ([*each.trainer.heads[-1].parameters()] for each in (first, second))
    x, y = first.dataset.train.first(32)
    first.trainer.step(x, y)
    assert held.item() != 1
    assert fresh.item() == 1
    assert next(first.model.loss.parameters()) is held


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize("methods", [("backprop", "greedy"), ("all",)])
def test_each_method_is_prepared_once_beside_its_runs(methods, tmp_path, monkeypatch):
    prepared = Counter()

    def counted(*arguments, **options):
        prepared[arguments[3]] += 1
        return Trainer(*arguments, **options)

    monkeypatch.setattr("stretto.study.prepare.Trainer", counted)
    opened = open_study(replace(SETTINGS, methods=methods), tmp_path / "study")
    assert set(prepared.values()) == {1}
    assert set(opened.page.pictures) == set(opened.settings.methods) <= set(prepared)
    if methods != ("all",):
        compare(opened, jobs=1)
        assert prepared == {"backprop": 3, "greedy": 3}  # two runs each


def test_batch_norms_in_parts_of_minibatches_are_noted(tmp_path):
    options = {"methods": ("backprop", "gpipe", "pb"), "stages": 2, "model": "cnn", "data": "digits"}
    settings = replace(SETTINGS, model_options={"depth": 2, "width": 4}, **options)
    (note,) = open_study(settings, tmp_path / "study").notes
    assert note.startswith("gpipe")
    assert "batch norms normalise each of the parts of a minibatch" in note
    assert open_study(replace(settings, methods=("backprop", "pb")), tmp_path / "other").notes == ()


def test_overlapping_on_two_stages_is_told_to_be_backprop(tmp_path):
    settings = replace(SETTINGS, stages=2, methods=("backprop", "overlapping", "overlapping(delay=1)", "greedy"))
    (note,) = open_study(settings, tmp_path / "study").notes
    assert note.startswith("overlapping on 2 stages is backprop: the loss at the top trains all of them")
    prepared = prepare(resolve(replace(SINGLE, method="overlapping", stages=2)))
    assert notes_on({"overlapping": prepared}, []) == (note,)


@pytest.mark.usefixtures("plain_pages")
def test_a_study_without_a_finished_run_is_begun_anew(tmp_path, monkeypatch):
    out, other = tmp_path / "study", replace(SETTINGS, steps=13, lr=(0.05,), methods=("overlapping",))

    def breaks(task, on_step):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(run_processes, "make_run", breaks)
        assert len(made(out).failures) == 3
    with study.claimed(open_study(SETTINGS, out)):
        pass  # the same settings: nothing is removed
    assert len(list((out / "runs").glob("*.failed.txt"))) == 3
    (out / "runs" / ".lost.partial").mkdir()
    opened = open_study(other, out)
    assert opened.notes == (f"{out} holds a study with other settings and without a finished run: it is begun anew",)
    with pytest.raises(UsageError, match="steps: 12 there, 13 here"), study.claimed(opened, exclusive=False):
        pass
    assert compare(opened, jobs=1).failures == ()
    assert [path.name for path in (out / "runs").iterdir()] == ["overlapping-lr0.05-b32-s0"]
    assert open_study(other, out).notes == ()
    with pytest.raises(UsageError, match="steps: 13 there, 12 here"):
        open_study(SETTINGS, out)


def test_a_study_with_a_checkpoint_is_not_begun_anew(tmp_path):
    with study.claimed(open_study(SETTINGS, tmp_path)):
        (tmp_path / "runs" / ".some.checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="steps: 12 there, 13 here"):
        open_study(replace(SETTINGS, steps=13), tmp_path)


@pytest.mark.usefixtures("plain_pages")
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_diverged_runs_end_early_and_the_study_goes_on(tmp_path, jobs):
    out, advanced = tmp_path / "study", []
    outcome = made(out, replace(SETTINGS, lr=(0.05, 1e12)), jobs=jobs, on_steps=advanced.append)
    assert sum(advanced) == 4 * 12
    status = {record.id: record.status for record in outcome.records}
    assert status["backprop-lr0.05-b32-s0"] == "finished"
    assert status["overlapping-lr0.05-b32-s0"] == "finished"
    diverged = next(record for record in outcome.records if record.options["lr"] == 1e12)
    assert diverged.status == "diverged"
    assert 1 <= diverged.diverged_at <= 12
    assert diverged.test_loss is None
    assert all(math.isfinite(point.train_loss) for point in diverged.points)
    text = json.dumps(outcome.to_json(), allow_nan=False)
    assert '"diverged"' in text
    assert (out / "report.html").is_file()
    again = []
    made(out, replace(SETTINGS, lr=(0.05, 1e12)), on_run=again.append)
    assert again == []  # a diverged run is finished too


def test_a_study_in_which_everything_diverges_has_a_report(tmp_path):
    outcome = made(tmp_path / "study", replace(SETTINGS, lr=(1e12,), methods=("backprop",)))
    assert [record.status for record in outcome.records] == ["diverged"]
    assert outcome.report.is_file()


class CountedSteps:
    """A counter of energy that grows by a joule whenever it is read."""

    name = "steps"

    def __init__(self):
        self.read = 0

    def joules(self):
        self.read += 1
        return float(self.read)


@pytest.mark.usefixtures("no_pictures")
def test_the_energy_of_a_run_stands_in_its_events(tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "energy_meter", lambda *_: EnergyMeter([CountedSteps()]))
    outcome = made(tmp_path / "alone", replace(SETTINGS, methods=("backprop",), lr=(0.1,)))
    (record,) = outcome.records
    assert [point.joules for point in record.points] == [1.0, 2.0, 3.0]  # not those between pauses and starts
    assert record.energy_source == "steps"
    text = outcome.report.read_text(encoding="utf-8")
    assert "measured (steps, of one device that did the work of all workers)" in text


def test_the_energy_of_runs_side_by_side_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "energy_meter", lambda *_: pytest.fail("measured"))
    settings = resolve(SINGLE)
    record = run(settings, tmp_path / "run", alone=False)
    assert {point.joules for point in record.points} == {None}


def test_measurements_and_checkpoints_are_not_in_the_energy(tmp_path, monkeypatch):
    counter = CountedSteps()

    def counted(work):
        def works(*arguments):
            counter.read += 1000
            return work(*arguments)

        return works

    monkeypatch.setattr(training_run, "energy_meter", lambda _: EnergyMeter([counter]))
    monkeypatch.setattr(training_run.Measurer, "measure", counted(training_run.Measurer.measure))
    monkeypatch.setattr(training_run.Checkpoints, "save", counted(training_run.Checkpoints.save))
    record = run(resolve(replace(SINGLE, checkpoint_every=3, measure=("sharpness",))), tmp_path / "run")
    assert [point.joules for point in record.points] == [1.0, 4.0]  # up to step 2; to checkpoints 3 and 6, and the end


@pytest.mark.parametrize(("device", "count"), [("auto", [0, 1]), ("cuda:1", [1]), ("cuda", [0, 1])])
def test_the_accelerators_that_processes_have_are_measured(monkeypatch, device, count):
    monkeypatch.setattr(devices, "accelerator", lambda: "cuda")
    monkeypatch.setattr(devices, "pick_device", torch.device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(training_run, "is_one_machine", lambda _: True)
    monkeypatch.setattr(training_run, "energy_meter", lambda chosen: sorted(device.index for device in chosen))
    trainer = SimpleNamespace(rank=0, processes=2)
    prepared = SimpleNamespace(trainer=trainer, settings=SimpleNamespace(device=device))
    assert training_run.meter_of(prepared) == count
    trainer.rank = 1
    assert training_run.meter_of(prepared) is None


def test_a_run_that_goes_on_counts_its_energy_on():
    before = Progress(joules_before=4.0, meter=EnergyMeter([CountedSteps()]))
    before.meter.start()
    before.meter.pause()
    kept = before.to_json()
    assert kept["joules"] == 5.0
    after = Progress.from_json(kept)
    assert after.joules is None  # nothing measures it any more
    after.meter = EnergyMeter([CountedSteps()])
    assert after.joules == 5.0
    unknown = Progress.from_json(Progress().to_json())
    unknown.meter = EnergyMeter([CountedSteps()])
    assert unknown.joules is None  # of the steps before nothing is known


@pytest.mark.usefixtures("no_pictures")
def test_power_and_price_of_a_cluster(tmp_path):
    one = replace(SETTINGS, model_options={"depth": 2, "width": 8}, methods=("backprop",), lr=(0.1,), steps=2)
    opened = open_study(one, tmp_path / "study")
    with study.claimed(opened):
        run(opened.tasks[0].settings, opened.tasks[0].folder)
    text = write_report(opened, cluster=find_cluster("8-nodes-of-8-h100")).read_text(encoding="utf-8")
    part = text.split('<section id="measures">')[1].split("</section>")[0]
    for told in ("<th>energy</th>", "<th>money</th>", "W on cluster", "an hour on cluster", "predicted to take there"):
        assert told in part, told
    known = find_cluster("16-workstations")
    without_watts = {name: replace(device, watts=None, idle_watts=None) for name, device in known.devices.items()}
    page = write_report(opened, cluster=replace(known, devices=without_watts))
    assert "<th>energy</th>" not in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("plain_pages")
def test_one_process_at_a_time(whole):
    with locked(whole / ".lock", whole), pytest.raises(UsageError, match=r"another process is at work on .*whole"):
        made(whole)
    made(whole)


def test_one_process_a_run(tmp_path):
    settings, folder = resolve(SINGLE), tmp_path / "run"
    with (
        store.RunWriter(folder),
        pytest.raises(UsageError, match=r"another process is at work on .*run"),
        store.RunWriter(folder),
    ):
        pass
    run(settings, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_folders_that_are_something_else(whole, tmp_path):
    resolved = resolve_study(SETTINGS).to_json()
    study.check_folder(whole, resolved)
    with pytest.raises(UsageError, match=r"steps: 12 there, 13 here\): choose another --out"):
        study.check_folder(whole, {**resolved, "steps": 13})
    with pytest.raises(UsageError, match=r"loss: 'auto' there, 'cross_entropy' here\)"):
        study.check_folder(whole, {**resolved, "loss": "cross_entropy"})
    with pytest.raises(UsageError, match=r"metric: \['f1=own.py:f1'\] there, \[\] here\)"):
        store.refuse_other(whole, "a study", {**resolved, "metric": ["f1=own.py:f1"]}, resolved)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="is a file"):
        study.check_folder(file, resolved)
    with pytest.raises(UsageError, match="is not empty and holds no study"):
        study.check_folder(tmp_path, resolved)
    with pytest.raises(UsageError, match=r"cannot write to .*/inside: .*file is a file"):
        made(file / "inside")
    for text in ("{", "[]", "{}", '{"settings": []}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(UsageError, match=r"is damaged .*study\.json"):
            study.check_folder(tmp_path, resolved)
        with pytest.raises(UsageError, match=r"is damaged .*study\.json"):
            read_study(tmp_path)


def test_the_same_settings_find_the_same_folder_again():
    first, second = (open_study(SETTINGS).out for _ in range(2))
    assert first == second
    assert open_study(replace(SETTINGS, steps=13)).out != first


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "mpl"}, "unknown model 'mpl': did you mean 'mlp'"),
        ({"data": "digit"}, "unknown data set 'digit': did you mean 'digits'"),
        ({"model_options": {"widht": 3}}, "no option 'widht'; did you mean 'width'"),
        ({"model_options": {"seed": 3}}, "seed is no option of a network"),
        ({"model": "transformer", "data": "digits"}, "take one of: mlp, cnn"),
        ({"methods": ("gredy",)}, "unknown method 'gredy': did you mean 'greedy'"),
        ({"methods": ("chunked(chunks=9)",)}, r"chunked(chunks=9) on 3 stages: use at most 3 chunks"),
        ({"methods": ("greedy(head=pooled)",)}, "head 'pooled' goes"),
        ({"methods": ("greedy", "greedy()")}, "methods lists 'greedy' twice"),
        ({"stages": 99}, "stages=99, but mlp has 3 blocks: use at most 3"),
        ({"workers": 4}, "workers=4 for 3 stages: use at most 3 workers"),
        ({"batch_size": (5000,)}, "batch_size=5000, but digits has 1083 training examples"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(tmp_path, wrong, message):
    with pytest.raises(UsageError) as error:
        open_study(replace(SETTINGS, **wrong), tmp_path / "study")
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_pictures")
def test_a_single_run(tmp_path):
    settings, folder = resolve(SINGLE), tmp_path / "run"
    assert not claim(folder, settings).made
    steps = []
    record = run(settings, folder, lambda step, _: steps.append(step))
    assert steps == list(range(1, 9))
    assert claim(folder, settings).made
    run(settings, tmp_path / "again")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    result = summary(*store.read_run(folder), folder)
    assert result["steps"] == 8
    assert result["test_accuracy"] == record.test_accuracy
    assert result["train_accuracy"] == record.train_accuracy == record.points[-1].train_accuracy
    with pytest.raises(UsageError, match=r"other settings \(lr: 0\.01 there, 0\.02 here\)"):
        claim(folder, replace(settings, lr=0.02))
    with pytest.raises(UsageError, match="is there already and holds no run"):
        claim(tmp_path, settings)
    study = read_study(folder)
    assert study.records() == (record,)
    assert write_report(study) == folder / "report.html"
    assert default_folder(settings) != default_folder(replace(settings, momentum=0.5))
    with pytest.raises(UsageError, match="nothing to report in"):
        read_study(tmp_path)


def test_train_accuracy_counts_right_answers_to_the_first_512_training_examples(tmp_path):
    settings = resolve(SINGLE)
    record = run(settings, tmp_path / "run")
    prepared = prepare(settings)
    network, train = Chain(*prepared.model.layers), prepared.dataset.train
    weights = load_file(tmp_path / "run" / "model.safetensors")
    blocks = {name.partition(".")[2]: value for name, value in weights.items() if not name.startswith("heads.")}
    network.load_state_dict(blocks)  # without the stage's number
    right = network(train.x[:512]).argmax(1) == train.y[:512]
    assert record.train_accuracy == pytest.approx(right.float().mean().item())
    assert record.train_accuracy != record.validation_accuracy


@pytest.mark.usefixtures("plain_pages")
def test_device_and_threads_are_recorded_and_do_not_make_another_run(tmp_path):
    """A study goes on with other threads, and says that its seconds cannot be compared."""
    seen = []
    first = replace(SETTINGS, methods=("backprop",), lr=(0.05,), steps=2, evaluations=1, device="cpu")
    before = torch.get_num_threads()
    single = made(tmp_path, first, on_steps=lambda _: seen.append(torch.get_num_threads()))
    assert several_devices(single.records) == ""
    shutil.rmtree(tmp_path / "runs" / "backprop-lr0.05-b32-s0")
    both = replace(first, threads=2)
    assert open_study(both, tmp_path).settings.to_json() == open_study(first, tmp_path).settings.to_json()
    assert both.digest == first.digest
    again = made(tmp_path, both, on_steps=lambda _: seen.append(torch.get_num_threads()))
    assert {1, 2} <= set(seen)
    assert torch.get_num_threads() == before
    told = [(record.device, record.threads) for record in (*single.records, *again.records)]
    assert told == [("cpu", 1), ("cpu", 2)]
    assert json.loads((tmp_path / "runs/backprop-lr0.05-b32-s0/run.json").read_text())["record"]["threads"] == 2
    sentence = "Runs were not all computed alike: 1 on cpu, 1 thread; 1 on cpu, 2 threads."
    assert several_devices((*single.records, *again.records)).startswith(sentence)


def test_stages_workers_and_schedule_reach_the_trainer(tmp_path):
    base = replace(SINGLE, model_options={"depth": 4, "width": 8}, stages=2, method="backprop")
    records = {workers: run(resolve(replace(base, workers=workers)), tmp_path / str(workers)) for workers in (1, 2)}
    assert records[1].train_loss == records[2].train_loss  # placement changes costs, never numbers
    cosine = run(resolve(replace(base, schedule="cosine")), tmp_path / "cosine")
    assert cosine.train_loss != records[2].train_loss


def test_a_reference_batch_scales_rate_and_momentum():
    """For every batch size of a study, from the rates that stay the runs' names."""
    study = resolve(replace(SETTINGS, methods=("backprop",), lr=(0.1,), batch_size=(4, 128), reference_batch=128))
    found = {}
    for settings in study.runs():
        group = prepare(settings).trainer._stages[0].optimizer.param_groups[0]
        found[settings.batch_size] = (group["lr"], group["momentum"])
        assert settings.lr == 0.1
    momentum = 0.9 ** (1 / 32)
    assert found[4] == (pytest.approx(0.1 / 32 * (1 - momentum) / 0.1), pytest.approx(momentum))
    assert found[128] == (pytest.approx(0.1), pytest.approx(0.9))


def test_evaluations_are_closer_together_at_the_start():
    for steps, evaluations in [(600, 40), (1, 40), (7, 3), (400, 1)]:
        chosen = sorted(evaluation_steps(steps, evaluations))
        assert chosen[-1] == steps
        assert chosen[0] >= 1
        assert len(chosen) <= evaluations
    assert sorted(evaluation_steps(100, 4)) == [7, 25, 57, 100]


@pytest.mark.usefixtures("plain_pages")
def test_processes_are_not_more_than_runs(tmp_path, monkeypatch):
    started = []
    start = fork_server.start
    monkeypatch.setattr(fork_server, "start", lambda *work: started.append(start(*work)) or started[-1])
    made(tmp_path / "study", replace(SETTINGS, lr=(0.1,), methods=("greedy",)), jobs=5)
    assert len(started) == 1
