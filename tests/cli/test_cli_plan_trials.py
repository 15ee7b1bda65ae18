"""stretto plan --try: plans that are trained for a moment before one is chosen."""

import json
import os
import signal
import tomllib

import pytest

from cli.processes import descendants, gone, left, start
from cluster_text import cluster_text
from stretto.cli import main
from stretto.mesh import Mesh
from stretto.plan import Candidate, Plan
from stretto.plan.trials import Trial, TrialFailedError
from stretto.study import trial_processes
from stretto.study.plan_trials import try_plans
from stretto.study.trial_processes import TrialGroup
from waiting import wait_for

SMALL = ("--model", "mlp", "--model-options.width", "16", "--model-options.depth", "4")


@pytest.fixture
def cluster(tmp_path):
    def write(nodes=1):
        file = tmp_path / "cluster.toml"
        file.write_text(cluster_text(nodes=nodes))
        return str(file)

    return write


@pytest.fixture
def made_up(monkeypatch):
    """Groups of processes that are none: they say made-up `seconds`, of one worker and of several."""

    class Group:
        ended = []  # noqa: RUF012
        seconds = (0.002, 0.0015)

        def __init__(self, training):
            self.training = training

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.ended.append(self)

        def await_ready(self):
            if self.training.get("sync") == "fully-shard":
                raise TrialFailedError("it does not start")

        def fill(self):
            pass

        def turn(self):
            return self.seconds[self.training.get("workers", 1) > 1]

    monkeypatch.setattr(trial_processes, "TrialGroup", Group)
    return Group


def run(capsys, *words):
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_plan_that_was_measured_fastest_is_written_and_kept(capsys, tmp_path, cluster, made_up):
    words = ("plan", *SMALL, "--cluster", cluster(), "--out", tmp_path / "plan.toml")
    told = json.loads(run(capsys, *words, "--try", 4, "--json"))
    assert len(made_up.ended) == len(told["tried"]) + len(told["not_tried"]) == 5
    assert told["tried"][0]["pipeline"] == told["tried"][0]["data_parallel"] == 1
    assert {each["measured_seconds"] for each in told["tried"]} == {0.002, 0.0015}
    (chosen,) = (each for each in told["tried"] if each["chosen"])
    assert (chosen["workers"], told["measured_seconds"], told["try_noise"]) == (2, 0.0015, 0)
    assert told["predicted_seconds"] == chosen["predicted_seconds"]
    assert {"tensor", "space", "sharding", "stages", "microbatches", "recompute"} <= {*chosen}
    assert {each["reason"] for each in told["not_tried"]} <= {"it does not start"}
    plan = tomllib.loads((tmp_path / "plan.toml").read_text())
    assert plan["measured"]["seconds_per_step"] == 0.0015
    assert plan["plan"]["method"] == chosen["method"]

    later = json.loads(run(capsys, *words, "--json"))
    assert (later["measured_seconds"], later["try_seconds"]) == (0.0015, 0)
    assert later["chosen"] == told["chosen"]
    other = json.loads(run(capsys, *words, "--optimizer", "adam", "--json"))
    assert "measured_seconds" not in other, "another optimizer is another problem"
    assert {path.name for path in tmp_path.iterdir()} >= {"cluster.tried.json", "plan.toml"}


def test_what_is_printed_of_trials(capsys, tmp_path, cluster, made_up, monkeypatch):
    words = ("plan", *SMALL, "--cluster", cluster(), "--out", tmp_path / "plan.toml", "--methods", "pb", "--stages", 2)
    told = run(capsys, *words, "--try", 1)
    assert "backprop  one worker  " in told
    assert "2.00 ms   2.00 ms  not among the choices" in told
    assert "1.50 ms   1.50 ms  chosen" in told
    assert "trials are kept in" in told
    assert "not among the choices that" not in told
    assert "tried on 20" in run(capsys, *words)
    monkeypatch.setattr(made_up, "seconds", (0.001, 0.0015))
    told = run(capsys, *words, "--try", 1)
    assert "1.50 ms   1.50 ms  chosen" in told
    assert "the fastest is not among the choices that the options leave" in told


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--try", 0), "try=0: give the number of plans to train, 1 or more"),
        (("--try", 2, "--objective", "memory"), "trials measure time"),
        (("--try", 2, "--workers", 4), "4 workers of cluster 'two' are on several nodes of 2: give --workers 2"),
        (("--try", 2, "--workers", 2, "gpt3-small"), "stretto train has no data for gpt3-small"),
        (("--try", 2, "8-a100"), "measure this one with stretto calibrate"),
    ],
)
def test_trials_that_cannot_be_made_are_refused(capsys, tmp_path, cluster, words, reason):
    file, words = tmp_path / "plan.toml", [*map(str, words)]
    model = words.pop() if words[-1] == "gpt3-small" else "mlp"
    where = words.pop() if words[-1] == "8-a100" else cluster(nodes=2)
    given = ["--model", model, "--dtype", "float32", "--cluster", where, "--out", str(file)]
    assert main(["plan", *given, *words]) == 2
    assert reason in capsys.readouterr().err
    assert not file.exists()


def test_a_group_trains_in_turns_and_tells_which_of_its_processes_has_gone(tmp_path):
    training = {
        "model": "mlp",
        "model_options": {"depth": 4},
        "method": "1f1b(microbatches=2)",
        "workers": 2,
        "stages": 2,
    }
    with TrialGroup(training) as group:
        group.await_ready()
        group.fill()
        assert 0 < group.turn() < 1
        os.kill(group._processes[1].process.pid, signal.SIGKILL)
        with pytest.raises(TrialFailedError, match=r"a worker \(process id \d+\) was ended by SIGKILL; .* memory"):
            group.turn()
        assert group._processes == []


@pytest.mark.slow
def test_a_plan_that_its_trainer_refuses_is_left_out():
    candidate = Candidate(1, Mesh(), 4096)
    trials = [
        Trial(Plan(candidate=c, bounds=(0, 4), formula=1.0, seconds=1.0, value=1.0, bytes=(1.0,)))
        for c in (candidate, candidate._replace(batch=16))
    ]
    outcome = try_plans(trials, {"model": "mlp", "model_options": {"depth": 4}}, lambda _: None)
    assert "batch_size=4096, but digits has" in outcome.failed[0].failure
    assert [trial.plan.candidate.batch for trial in outcome.trials] == [16]
    assert outcome.chosen.reported > 0


@pytest.mark.slow
def test_plans_are_tried_on_processes(tmp_path, cluster):
    words = ["plan", *SMALL, "--cluster", cluster(), "--out", str(tmp_path / "plan.toml"), "--try", "2", "--json"]
    process = start(words, tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    told = json.loads(out)
    assert len(told["tried"]) == 3
    fastest = min(told["tried"], key=lambda each: each["measured_seconds"])
    assert fastest["chosen"]
    assert 0 < told["measured_seconds"] < 1
    assert left(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.toml", "cluster.tried.json", "plan.toml", "scratch"}


@pytest.mark.slow
def test_ctrl_c_ends_all_trials_and_writes_nothing(tmp_path, cluster):
    words = ["plan", *SMALL, "--cluster", cluster(), "--out", str(tmp_path / "plan.toml"), "--try", "2"]
    process = start(words, tmp_path)
    wait_for(lambda: len(descendants(process.pid)) >= 7, process)  # the fork server, its tracker, five workers
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted; nothing has been written" in err
    assert gone(started)
    assert left(tmp_path) == []
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.toml", "scratch"}
