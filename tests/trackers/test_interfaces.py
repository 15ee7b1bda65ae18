"""Each tracker read back by its own means: the same run, settings, rows under their steps, files, and going on."""

import importlib
import tempfile
from pathlib import Path

import pytest

from stretto.trackers import CSV, MLflow, RunDescription, TensorBoard, WandB
from stretto.trackers.tracker import TrackedRun

RUN = RunDescription("baseline", {"method": "pb", "nested": {"width": 8}}, "worker 0  0F0", group="study")
ROWS = [(1, {"loss": 1.0, "lr": 0.1}), (2, {"loss": 0.5})]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")


def twice(tracker):
    """A run that was interrupted after step 3 with a checkpoint of step 2, and went on; {tracker: id}."""
    first = TrackedRun([tracker], RUN, pytest.fail)
    for step, values in [*ROWS, (3, {"loss": 99.0})]:
        first.write(step, values)
    ids = first.ids
    first.close(finished=False)
    again = RunDescription(RUN.name, RUN.settings, RUN.schedule, RUN.group, ids, since=2)
    second = TrackedRun([tracker], again, pytest.fail)
    assert second.ids == ids
    second.write(3, {"loss": 0.25})
    page = Path("report.html")
    page.write_text("<p>report</p>")
    second.add_file(page)
    second.close(finished=True)
    return ids


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard():
    twice(TensorBoard(folder="runs"))
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator("runs/study/baseline")
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("step/loss")] == [(1, 1.0), (2, 0.5), (3, 0.25)]
    (settings,) = events.Tensors("settings/text_summary")
    assert b"| nested.width | 8 |" in settings.tensor_proto.string_val[0]
    assert b"0F0" in events.Tensors("schedule/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow():
    import mlflow

    tracker = MLflow(uri="sqlite:///runs.db")
    tracker.prepare("study")
    ids = twice(tracker)
    client = mlflow.MlflowClient("sqlite:///runs.db")
    run = client.get_run(ids["mlflow"])
    assert run.info.run_name == "baseline"
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "study"
    assert run.data.params == {"method": "pb", "nested.width": "8"}
    history = client.get_metric_history(ids["mlflow"], "step/loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 0.5), (3, 99.0), (3, 0.25)]
    assert run.data.metrics["step/loss"] == 0.25
    assert {file.path for file in client.list_artifacts(ids["mlflow"])} == {"schedule.txt", "report.html"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where it leaves folders until its process ends
    (name,) = twice(WandB(project="mine")).values()
    importlib.import_module("wandb").teardown()  # its service, which would wait for further runs
    folders = sorted(Path("wandb").glob(f"offline-run-*-{name}"))
    assert folders, [*Path("wandb").iterdir()]
    record_type = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    rows, configs = [], []
    for folder in folders:
        for data in records(next(folder.glob("*.wandb")).read_bytes()):
            record = record_type()
            record.ParseFromString(data)
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
            configs += [item.key for item in record.run.config.update]
    losses = [(int(row["step"]), float(row["step/loss"])) for row in rows if "step/loss" in row]
    assert losses == [(1, 1.0), (2, 0.5), (3, 99.0), (3, 0.25)]
    assert {"method", "nested"} <= {*configs}


def records(file):
    """The records of a file of W&B's: LevelDB's log format, of which long records may come in parts."""
    place, whole = 7, b""
    while place < len(file):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(file[place + 4 : place + 6], "little"), file[place + 6]
        whole += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_a_folder_may_be_named_by_a_way_that_leads_back(tmp_path):
    tracker, told = CSV(folder=str(tmp_path / "there" / ".." / "logs")), []
    (tmp_path / "there").mkdir()
    first = TrackedRun([tracker], RunDescription("mine"), told.append)
    first.write(1, {"loss": 2.0})
    ids = dict(first.ids)
    first.close(finished=False)
    again = TrackedRun([tracker], RunDescription("mine", ids=ids, since=1), told.append)
    again.write(2, {"loss": 1.0})
    again.close(finished=True)
    assert told == []
    assert len((tmp_path / "logs" / "mine" / "metrics.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("former", ["/etc/mine", "runs/../mine", "mine", "runs/away/mine", "runs"])
@pytest.mark.parametrize("tracker", [CSV(folder="runs"), TensorBoard(folder="runs")], ids=str)
def test_what_a_checkpoint_says_leads_out_of_no_folder(tracker, former, tmp_path):
    """Where a run was logged is in its checkpoint, which may be somebody else's."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.csv").write_text("step\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "away").symlink_to(tmp_path)
    told = []
    run = TrackedRun([tracker], RunDescription("baseline", ids={tracker.name: former}, since=1), told.append)
    run.write(2, {"loss": 1.0})
    run.close(finished=True)
    assert "which is not below folder='runs': name the folder above it" in told[0]
    assert (tmp_path / "mine" / "metrics.csv").read_text() == "step\n"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["metrics.csv"]


def test_a_table_replaces_no_other_files(tmp_path):
    (tmp_path / "logs" / "baseline").mkdir(parents=True)
    (tmp_path / "logs" / "baseline" / "settings.json").write_text("kept")
    told = []
    TrackedRun([CSV()], RunDescription("baseline"), told.append).close(finished=True)
    assert "is there already and holds no metrics.csv" in told[0]
    assert (tmp_path / "logs" / "baseline" / "settings.json").read_text() == "kept"
