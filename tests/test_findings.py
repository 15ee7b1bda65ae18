"""The harness of experiments/findings: halving, arrivals, intervals, verdicts, the store and the page made of it."""

import dataclasses
import importlib
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import scipy.stats

import stretto

FINDINGS = Path(__file__).parent.parent / "experiments" / "findings"
FLAT = {0: 4.0, 10: 3.0, 20: 2.0}


@pytest.fixture
def harness(monkeypatch):
    """Its modules by name; another folder's `main` is imported by other tests."""
    monkeypatch.syspath_prepend(FINDINGS)
    names = ("cells", "halving", "intervals", "store", "work", "results", "page", "again", "training")
    yield type("Harness", (), {name: importlib.import_module(f"harness.{name}") for name in names})
    for name in [name for name in sys.modules if name.split(".")[0] in ("harness", "depth", "main")]:
        del sys.modules[name]


def losses_of(rate, delay):
    """A made-up training: the best rate is 0.4, delay costs steps; 0.01 more a seed."""
    return 10 * (1 + delay) * (1 + abs(math.log2(rate / 0.4)))


@pytest.fixture
def study(harness):
    """Two cells whose curves fall as 4 - step / time down to 1; the rates of the second one have their best beyond."""

    def train(cell, rate, seed, steps, data):
        time = losses_of(rate, cell.settings["delay"]) + 0.1 * seed
        curve = [[step, 1.0, max(1.0, 4 - step / time), 0.5] for step in range(0, steps + 1, 5)]
        diverged = 5 if rate > cell.settings.get("most", 10) else None
        validation = None if diverged else curve[-1][2]
        return {"curve": curve, "validation": validation, "diverged": diverged, "seconds a step": {"wall": 1, "cpu": 1}}

    cell = harness.cells.Cell
    rates = (0.1, 0.2, 0.4, 0.8)
    return harness.cells.Study(
        name="made-up", title="Made up", question="Which?", train=train, horizon=20,
        cells=(
            cell("plain", "backprop", "SGD", rates, 40, {"delay": 0}),
            cell("late", "pb", "SGD", (0.05, 0.1, 0.2, 0.39), 40, {"delay": 0.5}, reference="plain"),
            cell("cured", "pb", "SGD", rates, 40, {"delay": 0.1}, reference="plain", uncured="late"),
        ),
        claims=(
            harness.cells.Claim("at most 1.3", "ratio", ("late", "cured"), 1.3),
            harness.cells.Claim("at most 1.05", "ratio", ("late", "cured"), 1.05),
        ),
    )  # fmt: skip


def finished(harness, study, path):
    """Make all runs of a study in this process."""
    store = harness.store.Store(path / "runs.jsonl")
    harness.work.work(study, store, None, 1)
    return store


def test_arrivals_are_interpolated(harness):
    arrival, curve = harness.intervals.arrival, list(FLAT.items())
    assert arrival(curve, 2.5) == 15
    assert arrival(curve, 2.0) == 20
    assert arrival(curve, 4.5) == 0
    assert arrival(curve, 1.9) is None
    assert arrival([(0, 4.0), (10, 2.0), (20, 3.0), (30, 1.0)], 2.0) == 10  # the first time
    assert harness.intervals.value_at(curve, 5) == 3.5
    with pytest.raises(ValueError, match="not between"):
        harness.intervals.value_at(curve, 21)


def test_intervals_are_students(harness):
    found = harness.intervals.interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high - 2 == 2 - found.low == pytest.approx(4.302653 / math.sqrt(3), rel=1e-4)
    with pytest.raises(KeyError):
        harness.intervals.interval([1.0])  # one value has no interval


def test_students_quantiles_are_those_of_scipy(harness):
    for number, quantile in harness.intervals.STUDENT.items():
        assert quantile == pytest.approx(scipy.stats.t.ppf(0.975, number - 1), abs=5e-4)


def test_ratios_are_formed_seed_by_seed(harness):
    ratio, ends = harness.intervals.ratio, {0: 100, 1: 100, 2: 100}
    same = ratio({0: 20, 1: 40, 2: 80}, {0: 10, 1: 20, 2: 40}, ends)
    assert tuple(same) == pytest.approx((2, 2, 2))
    late = ratio({0: 20, 1: None, 2: 80}, {0: 10, 1: 20, 2: 40}, ends)
    assert (late.low, late.high) == (pytest.approx(2), math.inf)  # the missing seed is later than 100 / 20
    assert ratio({0: 20, 1: 40}, {0: 10, 1: None}, ends) is None
    assert ratio({0: 20, 1: 40}, {0: 10, 1: 0.0}, ends) is None
    assert ratio({0: 20}, {0: 10}, ends) is None
    assert str(late) == "> 2.00"


def test_verdicts_need_intervals_that_part(harness):
    interval, compared, bounded = harness.intervals.Interval, harness.intervals.compared, harness.intervals.bounded
    one, two, wide = interval(1, 0.9, 1.1), interval(1.3, 1.2, 1.4), interval(1.2, 1.1, 1.5)
    assert [compared(one, two), compared(two, one), compared(one, wide), compared(one, None)] == [
        "less", "more", "undecided", "undecided",
    ]  # fmt: skip
    assert compared(interval(math.inf, 1.2, math.inf), one) == "more"
    assert [bounded(one, 1.1), bounded(two, 1.1), bounded(wide, 1.3), bounded(None, 1)] == [
        "reached", "missed", "undecided", "undecided",
    ]  # fmt: skip


def test_the_best_rate_goes_on_and_an_edge_is_extended(harness, study, tmp_path):
    store = finished(harness, study, tmp_path)
    halving, runs = harness.halving, store.read()
    plain, late, _ = study.cells
    assert halving.chosen_rate(plain, runs) == 0.4
    assert halving.used_rates(plain, runs) == plain.rates
    assert halving.used_rates(late, runs) == (0.05, 0.1, 0.2, 0.39, 0.7605)  # the largest was best, then no more
    assert halving.chosen_rate(late, runs) == 0.39
    assert not halving.at_edge(late, runs)
    assert len(runs) == 3 * 7 + 1
    assert halving.extensions(study, runs) == 1
    assert halving.next_runs(study, runs) == []
    rung = [run["seed"] for run in runs.values() if run["steps"] == 20]
    assert set(rung) == {0}


def test_grids_grow_twice_at_most_and_not_beyond_the_runs_of_a_study(harness, study, monkeypatch, tmp_path):
    far = harness.cells.Cell("far", "pb", "SGD", (0.001, 0.002, 0.004, 0.008), 40, {"delay": 0})
    alone = harness.cells.Study("far", "", "", (far,), study.train, 20)
    runs = finished(harness, alone, tmp_path / "a").read()
    assert harness.halving.used_rates(far, runs)[-2:] == (0.016, 0.032)
    assert harness.halving.at_edge(far, runs)
    monkeypatch.setattr(harness.halving, "MOST_RUNS", 8)
    assert len(finished(harness, alone, tmp_path / "b").read()) == 8
    wild = harness.cells.Cell("wild", "pb", "SGD", (0.1, 0.2, 0.4, 0.8), 40, {"delay": 0, "most": 0.06})
    runs = finished(harness, harness.cells.Study("wild", "", "", (wild,), study.train, 20), tmp_path / "c").read()
    assert harness.halving.chosen_rate(wild, runs) == 0.05  # all diverged: smaller ones were tried


def test_a_study_goes_on_where_it_was(harness, study, monkeypatch, tmp_path):
    whole = finished(harness, study, tmp_path / "whole").read()
    store, made = harness.store.Store(tmp_path / "part" / "runs.jsonl"), []
    original = harness.work.make_run

    def interrupted(study, run, *rest):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(run.key)
        return original(study, run, *rest)

    monkeypatch.setattr(harness.work, "make_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        harness.work.work(study, store, None, 1)
    assert list(store.read()) == made
    monkeypatch.setattr(harness.work, "make_run", original)
    harness.work.work(study, store, None, 1)
    assert {key: run["curve"] for key, run in store.read().items()} == {key: run["curve"] for key, run in whole.items()}


def test_no_two_processes_make_a_run(harness, study, tmp_path):
    """The second one holds its claim as another process would: by a file of its own."""
    store, other = (harness.store.Store(tmp_path / "runs.jsonl") for _ in range(2))
    run = harness.halving.next_runs(study, {})[0]
    with store.claimed(run) as mine, other.claimed(run) as too:
        assert (mine, too) == (True, False)
    store.add(harness.work.make_run(study, run, None))
    with other.claimed(run) as again:
        assert not again  # it is finished
    assert [json.loads(line)["key"] for line in store.path.read_text().splitlines()] == [run.key]


def test_the_page_is_made_of_the_store(harness, study, tmp_path):
    store = finished(harness, study, tmp_path)
    page = harness.page.page(study, store.read())
    found = {cell.name: harness.results.result(study, store.read(), cell) for cell in study.cells}
    assert found["cured"].ratio.mean == pytest.approx(1.1, rel=0.02)
    assert "| cured | later | sooner |" in page
    assert "| at most 1.3 | **reached** | cured |" in page
    assert "| at most 1.05 | **missed** | cured |" in page
    assert "Not finished" not in page
    assert "| late | 0.05: " in page
    harness.page.write_page(study, store.read(), tmp_path)
    assert (tmp_path / "README.md").read_text() == page
    assert (tmp_path / "figure.svg").read_text().count("<circle") == 2
    runs = store.read()
    last = next(key for key, run in runs.items() if run["cell"] == "cured" and run["steps"] == 40 and run["seed"] == 2)
    changed = {**runs, last: {**runs[last], "diverged": 7}}
    assert "| 1 of 3 diverged |" in harness.page.page(study, changed)
    del changed[last]
    without = harness.page.page(study, changed)
    assert "Not finished: 1 runs" in without
    assert "**undecided**" not in without


def test_a_diverged_seed_never_arrives_and_errors_may_decide(harness, study, tmp_path):
    runs, results = finished(harness, study, tmp_path).read(), harness.results
    cured = study.cell("cured")
    last = next(key for key, run in runs.items() if run["cell"] == "cured" and run["steps"] == 40 and run["seed"] == 2)
    cut = {**runs[last], "curve": runs[last]["curve"][:2], "diverged": 6, "validation": None}
    found = results.result(study, {**runs, last: cut}, cured)
    assert (found.loss, found.arrived, found.ratio.high) == (None, None, math.inf)
    by_error = dataclasses.replace(study, metric="error")
    assert results.cutoff(by_error, runs, study.cells[0]) == 0.5
    assert results.result(by_error, runs, cured).arrived == 0  # made-up errors are 0.5 from the beginning
    assert results.cutoff(study, runs, study.cells[0], share=0.5) > results.cutoff(study, runs, study.cells[0])


def test_a_cell_is_trained_again(harness, study, tmp_path, capsys):
    store = finished(harness, study, tmp_path)
    assert harness.again.train_again(study, store, "late", [0, 1, 2], None) == 0
    assert "within the interval" in capsys.readouterr().out
    assert harness.again.train_again(study, store, "late", [90], None) == 1
    assert len(harness.store.Store(tmp_path / "again.jsonl").read()) == 4
    with pytest.raises(SystemExit, match="choose one of\nplain\nlate\ncured"):
        harness.again.train_again(study, store, "lat", [0], None)


TINY = """
import time
from harness import Cell, Study

def train(cell, rate, seed, steps, data):
    time.sleep(0.3)
    curve = [[0, None, 4.0, 0.5], [steps, 1.0, rate * (1 + seed), 0.5]]
    return {"curve": curve, "validation": abs(rate - 0.25), "diverged": None, "seconds a step": {"wall": 1, "cpu": 1}}

rates = (0.1, 0.2, 0.3, 0.4)
STUDY = Study("tiny", "Tiny", "?", tuple(Cell(n, "pb", "SGD", rates, 10) for n in "abcd"), train, 5)
"""


@pytest.mark.slow
def test_two_processes_share_a_study_and_an_end_of_both_loses_nothing(tmp_path):
    """The command itself: ended by SIGTERM, then gone on with, beside a second one."""
    shutil.copytree(FINDINGS / "harness", tmp_path / "harness")
    shutil.copy(FINDINGS / "main.py", tmp_path)
    (tmp_path / "tiny.py").write_text(TINY)
    command = [sys.executable, "main.py", "tiny"]
    store = tmp_path / "pages" / "tiny" / "runs.jsonl"
    with subprocess.Popen([*command, "--jobs", "2"], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as begun:
        for line in begun.stderr:
            if line.startswith("[3/"):
                break
        begun.send_signal(signal.SIGTERM)
        rest = begun.stderr.read()
    assert begun.returncode == 130, rest
    assert "the same command goes on" in rest
    kept = store.read_text().splitlines()
    assert 3 <= len(kept) < 28
    both = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in "12"]
    assert [each.communicate() and each.returncode for each in both] == [0, 0]
    lines = store.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 28
    assert "Not finished" not in (tmp_path / "pages" / "tiny" / "README.md").read_text()


def test_grids_of_less_than_four_rates_are_refused(harness):
    with pytest.raises(ValueError, match="at least four"):
        harness.cells.Cell("few", "pb", "SGD", (0.1, 0.2, 0.4), 40)


def test_a_run_is_measured_as_plain_training(harness, monkeypatch):
    """The decoder of study 1 with two blocks, against a loop without a Trainer; a loss that explodes stops it."""
    import torch

    depth = importlib.import_module("depth")
    monkeypatch.setattr(depth, "BLOCKS", 2)
    data = torch.randint(0, 9, (40, depth.CONTEXT), generator=torch.Generator().manual_seed(0))
    batches = [(data[i : i + 4], data[i : i + 4]) for i in range(0, 40, 4)]

    def trained(rate, stages, method="backprop"):
        trainer = stretto.Trainer(
            depth.network(9, stages, 0), stretto.mean(depth.loss), lambda p: torch.optim.SGD(p, lr=rate), method,
            device="cpu",
        )  # fmt: skip
        held = {"test": batches[:1], "validation": batches[:1]}
        return harness.training.measured_training(trainer, lambda n: batches[n], 4, 2, **held), trainer

    found, _ = trained(0.1, 1)
    model = torch.nn.Sequential(*depth.network(9, 1, 0))
    for x, y in batches[:4]:
        model.zero_grad()
        depth.loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert [point[0] for point in found["curve"]] == [0, 2, 4]
    assert found["curve"][-1][2] == pytest.approx(depth.loss(model(batches[0][0]), batches[0][1]).item(), rel=1e-4)
    assert found["diverged"] is None
    assert found["validation"] == found["curve"][-1][2]
    wild, _ = trained(1e4, 1)
    assert wild["diverged"] in (2, 3, 4)
    assert wild["validation"] is None
    _, trainer = trained(0.1, 2, "pipedream")
    sizes = harness.training.parameters_of(trainer)
    assert harness.training.weight_copies(trainer) == pytest.approx((2 * sizes[0] + sizes[1]) / sum(sizes), abs=1e-3)
    assert harness.training.optimizer_numbers(trainer) == 0
    same = [network.state_dict() for network in (torch.nn.Sequential(*depth.network(9, s, 3)) for s in (1, 2))]
    assert all(torch.equal(a, b) for a, b in zip(same[0].values(), same[1].values(), strict=True))


def test_the_runs_of_study_one_are_those_of_its_rules(harness):
    study = importlib.import_module("depth").STUDY
    assert (study.base_runs, study.horizon, len(study.cells)) == (182, 300, 26)
    for cell in study.cells:
        stretto.method(cell.method)


def test_the_rules_are_older_than_the_results():
    """The first commit of rules.md comes before that of any store."""
    first = ["git", "log", "--diff-filter=A", "--format=%at", "--"]
    stores = sorted(FINDINGS.glob("pages/*/runs.jsonl"))
    told = [subprocess.run([*first, path], cwd=FINDINGS, capture_output=True, text=True) for path in (
        FINDINGS / "rules.md", *stores)]  # fmt: skip
    times = [min(map(int, each.stdout.split()), default=None) for each in told]
    if told[0].returncode or times[0] is None:
        pytest.skip("a copy without its history")
    assert all(time is None or time > times[0] for time in times[1:])
