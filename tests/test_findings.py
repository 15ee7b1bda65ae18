"""The harness of experiments/findings: halving, arrivals, intervals, verdicts, the store and the page made of it."""

import dataclasses
import importlib
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import stretto
from stretto.methods.findings import findings
from stretto.nn.chain import Chain

FINDINGS = Path(__file__).parent.parent / "experiments" / "findings"
FLAT = {0: 4.0, 10: 3.0, 20: 2.0}


@pytest.fixture
def harness(monkeypatch):
    """Its modules by name; another folder's `main` is imported by other tests."""
    monkeypatch.syspath_prepend(FINDINGS)
    names = ("cells", "halving", "intervals", "store", "work", "results", "page", "again", "training")
    yield type("Harness", (), {name: importlib.import_module(f"harness.{name}") for name in names})
    own = {path.parent.name if path.stem == "__init__" else path.stem for path in FINDINGS.glob("**/*.py")}
    for name in [name for name in sys.modules if name.split(".")[0] in own]:
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
    assert harness.intervals.quantile(3) == 4.303  # as rules.md has it
    with pytest.raises(statistics.StatisticsError):
        harness.intervals.interval([1.0])  # one value has no interval


def test_a_value_that_all_seeds_have_is_shown_as_one(harness):
    """Of a quantised measure, such as errors of few images: no width would look like certainty."""
    ends, same = importlib.import_module("harness.end_tables"), harness.intervals.interval([0.1 - 0.08, 0.02, 0.02])
    assert str(same) == "0.02 in every run"
    assert ends.plus_minus(same) == "2.0 in every run"
    assert ends.points(harness.intervals.interval([2.0, 2.0])) == "+2.0 in every run"
    assert str(harness.intervals.interval([2.0, 2.1])) == "2.05 [1.41, 2.69]"


def test_a_loss_near_0_has_no_percentage(harness):
    """One seed of the reference below 0.1 nats is enough: then the difference stands there."""
    ends, finals = importlib.import_module("harness.end_tables"), harness.halving.Finals

    def cell(*losses):
        records = [{"curve": [[9, None, loss, 0.5], [10, None, loss, 0.5]], "diverged": None} for loss in losses]
        return finals(dict(enumerate(records)), 2)

    assert ends.above(cell(1.1, 1.1), cell(0.1, 0.11)) == "950 [315, 1.59e+03]"
    assert ends.above(cell(1.1, 1.1), cell(0.1, 0.09)) == "1 [0.941, 1.07] nats"
    assert ends.above(cell(1.1, 1.21), cell(1, 1.1), sign=True) == "10 % in every run"
    assert ends.above(cell(1.1), cell(0.1, 0.09)) == ""


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


def test_a_run_whose_last_loss_is_no_number_is_told_as_any_other(harness, study):
    run = harness.cells.Run(study.cells[0], 0.4, 0, 20)
    record = {"key": run.key, "diverged": None, "validation": None, "seconds a step": {"wall": 1}}
    assert "| 20 steps: validation inf, 3 s;" in harness.work.progress(study, {run.key: record}, record, 3.0, 1)


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
    assert "Means of three seeds at the best rate" in page
    assert "Validation loss after half of the steps, seed 0, at each rate" in page
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
    early = dataclasses.replace(study, share=0.5)
    assert results.cutoff(early, runs, study.cells[0]) > results.cutoff(study, runs, study.cells[0])


def test_a_cell_is_trained_again(harness, study, tmp_path, capsys, monkeypatch):
    store = finished(harness, study, tmp_path)
    assert harness.again.train_again(study, store, "late", [0, 1, 2], None) == 0
    assert "within the interval" in capsys.readouterr().out
    assert harness.again.train_again(study, store, "late", [90], None) == 1
    assert len(harness.store.Store(tmp_path / "again.jsonl").read()) == 4
    wild = next(run for run in store.read().values() if run["cell"] == "late")
    monkeypatch.setattr(harness.again, "make_run", lambda *_: {**wild, "diverged": 6})
    assert harness.again.train_again(study, store, "late", [0], None) == 1
    assert "diverged at step 6, outside" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="choose one of\nplain\nlate\ncured"):
        harness.again.train_again(study, store, "lat", [0], None)


TINY = """
import time
from pathlib import Path
from harness import Cell, Study

HERE = Path(__file__).parent
RUNS = HERE / "pages" / "tiny" / "runs.jsonl"

def train(cell, rate, seed, steps, data):
    while not (HERE / "go").exists() and RUNS.is_file() and len(RUNS.read_text().splitlines()) >= 3:
        time.sleep(0.05)
    curve = [[0, None, 4.0, 0.5], [steps, 1.0, rate * (1 + seed), 0.5]]
    return {"curve": curve, "validation": abs(rate - 0.25), "diverged": None, "seconds a step": {"wall": 1, "cpu": 1}}

rates = (0.1, 0.2, 0.3, 0.4)
STUDY = Study("tiny", "Tiny", "?", tuple(Cell(n, "pb", "SGD", rates, 10) for n in "abcd"), train, 5)
"""


@pytest.mark.slow
def test_two_processes_share_a_study_and_an_end_of_both_loses_nothing(tmp_path):
    """The command itself: ended by SIGTERM while it waits after three runs, then gone on with, beside a second one."""
    here = tmp_path / "experiments" / "findings"
    shutil.copytree(FINDINGS / "harness", here / "harness")
    shutil.copy(FINDINGS / "main.py", here)
    shutil.copytree(FINDINGS.parents[1] / "benchmarks" / "shared", tmp_path / "benchmarks" / "shared")
    (here / "tiny.py").write_text(TINY)
    command = [sys.executable, "main.py", "tiny"]
    store = here / "pages" / "tiny" / "runs.jsonl"
    with subprocess.Popen([*command, "--jobs", "2"], cwd=here, stderr=subprocess.PIPE, text=True) as begun:
        said = []
        for line in begun.stderr:
            said.append(line)
            if line.startswith(("[3/", "[4/")):  # two that end at once may both be told as the fourth
                break
        begun.send_signal(signal.SIGTERM)
        said.append(begun.stderr.read())
    assert begun.returncode == 130, "".join(said)
    assert "the same command goes on" in said[-1]
    kept = store.read_text().splitlines()
    assert 3 <= len(kept) < 28
    (here / "go").touch()
    both = [subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in "12"]
    assert [each.communicate() and each.returncode for each in both] == [0, 0]
    lines = store.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == 28
    assert "Not finished" not in (here / "pages" / "tiny" / "README.md").read_text()


def test_grids_of_two_or_three_rates_are_refused(harness):
    with pytest.raises(ValueError, match="four and more"):
        harness.cells.Cell("few", "pb", "SGD", (0.1, 0.2, 0.4), 40)


def test_a_rate_that_the_rules_fix_has_no_first_rung_and_later_seeds_come_last(harness, study, tmp_path):
    plain = dataclasses.replace(study.cells[0], seeds=(0, 1, 2, 3), first=10)
    fixed = harness.cells.Cell("fixed", "pb", "SGD", (0.1,), 40, {"delay": 0.2}, "plain", seeds=(0, 1, 2, 3))
    two = dataclasses.replace(study, cells=(plain, fixed), claims=())
    assert two.base_runs == 4 + 4 + 4
    assert len(harness.halving.runs_left(two, {})) == 12
    runs = finished(harness, two, tmp_path).read()
    made = [(run["cell"], run["steps"], run["seed"]) for run in runs.values()]
    assert [run for run in made if run[0] == "fixed"] == [("fixed", 40, seed) for seed in range(4)]
    assert made[:4] == [("plain", 10, 0)] * 4
    assert [run[2] for run in made[-2:]] == [3, 3]
    assert not harness.halving.at_edge(fixed, runs)
    found = harness.results.result(two, runs, fixed)
    assert found.complete
    assert found.ratio.mean > 1
    page = harness.page.page(two, runs)
    assert "Means of four seeds" in page
    assert "the smallest ratio of four seeds" in " ".join(page.split())
    assert "Validation loss after 10 steps, seed 0" in page


def test_a_run_is_measured_as_plain_training(harness, monkeypatch):
    """The decoder of study 1 with two blocks, against a loop without a Trainer; a loss that explodes stops it."""
    import torch

    depth = importlib.import_module("depth")
    monkeypatch.setattr(depth, "BLOCKS", 2)
    data = torch.randint(0, 9, (40, depth.CONTEXT), generator=torch.Generator().manual_seed(0))
    batches = [(data[i : i + 4], data[i : i + 4]) for i in range(0, 40, 4)]

    def trained(rate, stages, method="backprop"):
        trainer = stretto.Trainer(
            depth.network(9, stages, 0), depth.token_cross_entropy, lambda p: torch.optim.SGD(p, lr=rate), method,
            device="cpu",
        )  # fmt: skip
        held = {"test": batches[:1], "validation": batches[:1]}
        return harness.training.measured_training(trainer, lambda n: batches[n], 4, 2, held), trainer

    found, _ = trained(0.1, 1)
    model = torch.nn.Sequential(*depth.network(9, 1, 0))
    for x, y in batches[:4]:
        model.zero_grad()
        depth.token_cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert [point[0] for point in found["curve"]] == [0, 2, 4]
    assert found["curve"][-1][2] == pytest.approx(
        depth.token_cross_entropy(model(batches[0][0]), batches[0][1]).item(), rel=1e-4
    )
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


def test_the_runs_of_study_two_and_of_the_final_trial_are_those_of_the_rules(harness):
    slides, trial = importlib.import_module("slides"), importlib.import_module("final_trial")
    assert (slides.STUDY.base_runs, len(slides.ALL), trial.STUDY.base_runs) == (175 + 3, 8 + 9 + 8, 70)
    for cell in slides.ALL:
        stretto.method(cell.method)
    assert slides.pipemare_settings(400) == [(100, 0, 1), (100, 50, 1), (100, 50, 4), (400, 50, 1), (400, 100, 1)]
    assert slides.STUDY.cell("number words, PipeMare 3").method == "pipemare(reschedule=100, warmup=50, microbatches=4)"
    uncured = {cell.name.split(", ", 1)[1]: cell.uncured for cell in slides.ALL if cell.settings["task"] == "digits"}
    assert (uncured["SpecTrain"], uncured["PipeMare 1"], uncured["PB"]) == ("digits, PipeDream", "digits, PB", None)
    assert trial.STUDY.cell("AdamW, local").uncured == "AdamW, greedy"
    assert trial.STUDY.cells[0].method == "async"  # without the advice no run of the trial is made


def made_up(harness, study, error):
    """All runs of a study whose best rate is each grid's second one; `error(cell, seed)` ends each curve."""
    finished = {}
    while runs := harness.halving.next_runs(study, finished):
        for run in runs:
            last, loss = error(run.cell, run.seed), abs(math.log(run.rate / run.cell.rates[1]))
            curve = [[0, None, 4.0, 0.9], [run.steps, 1.0, 1 + last, last]]
            finished[run.key] = {
                "key": run.key, "cell": run.cell.name, "steps": run.steps, "curve": curve, "diverged": None,
                "validation": loss + last, "seconds a step": {"wall": 1, "cpu": 1}, "noisy": False, "load": [1, 1],
                "resolved": {"async": "pipedream(feedback=delay)", "local": "greedy"}.get(run.cell.method, "backprop"),
                "machine": {"processor": "none", "cores": 1, "threads": 1},
                "versions": {"python": "3", "torch": "2", "stretto": "0", "commit": "0"},
            }  # fmt: skip
    return finished


def test_the_slides_are_answered_by_their_verdicts(harness):
    """SpecTrain better than PipeMare, SC + LWP not to be told from SpecTrain, PipeMare 4 the best and as no delay."""
    slides = importlib.import_module("slides")
    ends = {"no delay": 0.1, "PB": 0.8, "PipeDream": 0.6, "SpecTrain": 0.2, "PipeMare 4": 0.3}

    def error(cell, seed):
        if cell.name == "number words, PipeMare 4":
            return 0.1 + 0.001 * seed
        if cell.name == "one example, SC + LWP":
            return 0.203 - 0.001 * seed  # above SpecTrain's by 0.003, 0.001 and -0.001
        return ends.get(cell.name.split(", ", 1)[1], 0.5) + 0.001 * seed

    finished = made_up(harness, slides.STUDY, error)
    assert len(finished) == 175 + 3
    page = " ".join(harness.page.page(slides.STUDY, finished).split())
    assert 'better than Pipe. Mare": at the end, so it is here; in batches of 8 SpecTrain ends at a test error' in page
    assert "(`pipemare(reschedule=400, warmup=50, microbatches=1)`) at 30.1 ± 0.2 %." in page
    assert "with updates of one example no improvement can be told: SC + LWP ends at 20.2" in page
    # the cures are SC, both forms of LWP, SC + LWP, SpecTrain twice, PipeMare twice
    assert "of the 8 cures here, against their clock without them, better: all, worse: none; against no" in page
    assert "delay, better: none, worse: 7 (one example, SC; " in page
    assert "not to be told by three seeds: 1 (number words, PipeMare 4)." in page
    assert "against PB better, against no delay undecided." in page
    assert "| digits, PipeMare 4 | 400 | 50 | 1 | 0.3010 | 30.1 ± 0.2 | stands for PipeMare |" in page
    assert "| digits, SpecTrain | 20.1 ± 0.2 | +10.0 in every run | worse | better than digits, PipeDream |" in page
    assert "main.py slides --jobs 2" in page
    lost = next(key for key in finished if key.startswith("digits, SpecTrain") and "seed 2" in key)
    assert "Not answered yet" in slides.sections({key: run for key, run in finished.items() if key != lost})
    wild = {**finished, lost: {**finished[lost], "diverged": 3, "validation": None}}
    assert "three seeds cannot tell; in batches of 8 SpecTrain ends at a test error of 1 of 3 diverged" in (
        slides.closing(wild)
    )


def test_users_read_what_the_package_has(harness):
    """The table of "Which method?" is the file's, and its rows are what each word stands for."""
    advice, main = importlib.import_module("harness.advice"), importlib.import_module("main")
    page = (FINDINGS.parents[1] / "docs/which-method.md").read_text(encoding="utf-8")
    assert advice.table(findings(), main.networks_near_zero()) in page
    said = advice.words(findings())
    assert said in page
    assert said in (FINDINGS.parents[1] / "README.md").read_text(encoding="utf-8")
    for word, optimizer in {(each.advice, each.optimizer) for each in findings()}:
        for stages in advice.DEPTHS:
            (row,) = (line for line in page.splitlines() if line.startswith(f'| `"{word}"` | {optimizer} | {stages} |'))
            assert f"`{stretto.advised(word, optimizer, stages)}`" in row.split(" | ")[3]


def test_no_percentage_of_a_loss_near_0_is_advised(harness):
    """ResNet-20 in batches of 8, a seed of which ends below 0.1 nats, where PipeMare's loss is 14 times as high."""
    advice, main = importlib.import_module("harness.advice"), importlib.import_module("main")
    near = main.networks_near_zero()
    assert near == {"ResNet-20, batches of 8"}
    (worst,) = (each for each in findings() if each.network in near and each.method.endswith("warmup=100)"))
    assert advice.percent(worst, near) == "n/a, near 0"
    assert advice.percent(worst).startswith("+1312")


def test_a_page_without_marks_is_refused(harness, tmp_path):
    markdown = importlib.import_module("harness.markdown")
    (tmp_path / "page.md").write_text("<!-- advice -->\nold\n<!-- end -->\n<!-- advice -->\n")
    markdown.write_between(tmp_path / "page.md", "advice", "new", blank="")
    assert (tmp_path / "page.md").read_text() == "<!-- advice -->\nnew\n<!-- end -->\n<!-- advice -->\n"
    (tmp_path / "page.md").write_text("nothing\n")
    with pytest.raises(ValueError, match="0 places"):
        markdown.write_between(tmp_path / "page.md", "advice", "new", blank="")


def test_the_gallery_has_what_the_stores_say(harness):
    """Its cards are those that the command writes today, and every claim stands there once."""
    main, gallery = importlib.import_module("main"), importlib.import_module("sections.gallery")
    stores = {study.name: main.stores_of(study.name) for card in gallery.CARDS for study in card.studies}
    text = gallery.gallery(stores)
    assert text in main.GALLERY.read_text(encoding="utf-8")
    claims = re.findall(r"^- (.*?): \*\*", " ".join(text.split("\n")).replace(" - ", "\n- "), re.MULTILINE)
    assert len(claims) == len(set(claims)) > 25
    assert "**missed**; 32 stages, AdamW, stash, rates / delay: > 1.55; 32 stages, AdamW, stash: > 1.55." in " ".join(
        text.split()
    )


def test_claims_of_several_studies_are_one(harness):
    gallery = importlib.import_module("sections.gallery")
    missed, less = ["missed", "missed"], ["less", "open"]
    together = [gallery._together(words) for words in (missed, ["missed", "reached"], ["missed", "undecided"])]
    assert together == ["missed", "reached", "undecided"]
    alike = [gallery._all(words) for words in (less, ["less", "undecided"], ["**missed**"], ["open"])]
    assert alike == ["less", "mixed", "missed", "open"]


def test_the_final_trial_reports_what_the_advice_was(harness):
    trial = importlib.import_module("final_trial")
    ends = {"no delay": 0.1, "async": 0.1, "local": 0.3, "pipedream": 0.2, "greedy": 0.3}
    finished = made_up(harness, trial.STUDY, lambda cell, seed: ends[cell.name.split(", ")[1]] + 0.001 * seed)
    page = " ".join(harness.page.page(trial.STUDY, finished).split())
    assert "| SGD, async | `pipedream(feedback=delay)` |" in page
    assert "ends at a test error of 10.1 ± 0.2 %; backprop at 10.1 ± 0.2 %, verdict undecided; `pipedream`" in page
    assert "at 20.1 ± 0.2 %, verdict better." in page
    assert "AdamW, local (`greedy`) ends at a test error of 30.1 ± 0.2 %;" in page
    assert "backprop at 10.1 ± 0.2 %, verdict worse; `greedy` at 30.1 ± 0.2 %, verdict undecided." in page
    assert "SGD, local: runs are missing." in trial.sections({})


def test_updates_of_one_example_are_plain_sgd_with_scaled_momentum(harness, monkeypatch):
    """Two steps without delay against a loop of its own; and the stages are those layers, however they are cut."""
    import torch

    slides = importlib.import_module("slides")
    monkeypatch.setattr(slides, "HELD_OUT", 4)
    task, cell = slides.TASKS["one example"], slides.STUDY.cell("one example, no delay")
    found = slides.train(cell, 0.4, 1, 2, None)
    data, model = slides.dataset("digits"), torch.nn.Sequential(*slides.stages_of(task, slides.network(task, 1), 1))
    momentum = 0.9 ** (1 / 128)
    rate, velocity = 0.4 / 128 * (1 - momentum) / 0.1, [torch.zeros_like(p) for p in model.parameters()]
    for n in range(2):
        x, y = harness.training.shuffled(data.train, 1, 1)(n)
        for p, v, g in zip(model.parameters(), velocity, torch.autograd.grad(
            torch.nn.functional.cross_entropy(model(x), y), list(model.parameters())), strict=True):  # fmt: skip
            v.mul_(momentum).add_(g)
            p.data -= rate * v
    loss = torch.nn.functional.cross_entropy(model(data.test.x[:4]), data.test.y[:4])
    assert found["curve"][-1][2] == pytest.approx(loss.item(), rel=1e-4)
    assert found["curve"][-1][2] != found["curve"][0][2]
    words = slides.TASKS["number words"]
    x, _ = slides.dataset(words.data).train.first(2)
    whole, cut = (slides.stages_of(words, slides.network(words, 3), number) for number in (1, words.stages))
    assert (len(cut), len(slides.network(task, 1).layers)) == (32, 34)
    assert torch.equal(Chain(*cut)(x), whole[0](x))


def test_a_run_of_the_final_trial_keeps_the_method_it_was_made_with(harness, monkeypatch):
    trial = importlib.import_module("final_trial")
    monkeypatch.setattr(trial, "clothes", lambda path: stretto.data.load("digits"))
    monkeypatch.setattr(trial, "BATCH", 2)
    monkeypatch.setattr(trial, "HELD_OUT", 4)
    cell = dataclasses.replace(trial.STUDY.cell("AdamW, local"), method="greedy()")
    found = trial.train(cell, 0.001, 0, 1, None)
    assert (found["resolved"], found["diverged"]) == ("greedy", None)


def test_a_window_of_losses_diverges_by_its_mean(harness):
    single, window = harness.training._Losses(1), harness.training._Losses(2)
    assert [single.diverge(loss) for loss in (2.0, 8.0, 8.1)] == [False, False, True]
    assert [window.diverge(loss) for loss in (1.0, 3.0, 13.0, 3.0, 13.1, math.nan)] == [
        False, False, False, False, True, True,
    ]  # fmt: skip


def test_a_study_that_makes_its_data_takes_no_folder(harness, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["main.py", "slides", "--data", "here", "--list"])
    with pytest.raises(SystemExit):
        importlib.import_module("main").main()
    assert "--data here: study slides makes its own data; leave --data out" in capsys.readouterr().err


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
