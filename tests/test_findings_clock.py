"""Studies 4 and 5 of experiments/findings: launches that are timed, and the pages made of made-up runs and launches."""

import importlib
import math
import sys
from pathlib import Path

import pytest

import stretto

FINDINGS = Path(__file__).parent.parent / "experiments" / "findings"
FOLDERS = ("harness", "depth", "main", "teams", "lecture", "lecture_parts", "by_the_clock", "clock_parts")


@pytest.fixture
def harness(monkeypatch):
    """Its modules by name; another folder's `main` is imported by other tests."""
    monkeypatch.setattr(sys, "path", [str(FINDINGS), *sys.path])
    names = ("cells", "intervals", "store", "page", "launches")
    yield type("Harness", (), {name: importlib.import_module(f"harness.{name}") for name in names})
    for name in [name for name in sys.modules if name.split(".")[0] in FOLDERS]:
        del sys.modules[name]


def test_times_are_products_with_intervals_from_both(harness):
    geometric, product = harness.intervals.geometric, harness.intervals.product
    one = geometric([1.0, 2.0, 4.0])
    half = 4.302653 * math.log(2) / math.sqrt(3)
    assert tuple(one) == pytest.approx((2, 2 * math.exp(-half), 2 * math.exp(half)), rel=1e-3)
    both = product(one, harness.intervals.Interval(3.0, 3 / math.exp(0.5), 3 * math.exp(0.5)))
    assert tuple(both) == pytest.approx([6 * math.exp(sign * math.hypot(half, 0.5)) for sign in (0, -1, 1)], rel=1e-3)
    late = product(one, harness.intervals.Interval(math.inf, 5.0, math.inf))
    assert (late.mean, late.low, late.high) == (math.inf, pytest.approx(5 * one.low), math.inf)


def test_launches_take_turns_and_go_on_where_they_were(harness, monkeypatch, tmp_path):
    launches, store = harness.launches, harness.store.Store(tmp_path / "launches.jsonl")
    todo = launches.interleaved([launches.Launch(name, "a:b") for name in "xyz"])
    assert [each.name + str(each.number) for each in todo] == ["x0", "y0", "z0", "y1", "z1", "x1", "z2", "x2", "y2"]
    others, most = iter([0.1, 2.0, 0.2]), []

    def made(launch, before, steps):
        if len(most) == 3:
            raise KeyboardInterrupt
        most.append(before)
        return {"key": launch.key, "figures": {"seconds": 1.0}, "noisy": before > 0.3, "others": [before, 0.0]}

    monkeypatch.setattr(launches, "made", made)
    monkeypatch.setattr(launches, "_prepare_imports", lambda launches: None)
    monkeypatch.setattr(launches, "cores_of_others", lambda: next(others, 0.0))
    with pytest.raises(KeyboardInterrupt):
        launches.make_launches(todo, store, noisy=True)
    assert most == [0.1, 2.0, 0.2]
    assert launches.launches_left(todo, store.read(), noisy=True) == list(todo[3:])
    assert launches.launches_left(todo, store.read()) == [todo[1], *todo[3:]]  # the noisy one is made again
    monkeypatch.setattr(launches, "cores_of_others", lambda: 1.0)
    monkeypatch.setattr(launches, "PATIENCE", 0.0)
    with pytest.raises(SystemExit, match="--noisy"):
        launches.make_launches(todo, store)
    with store.launching() as mine:
        assert mine
        with pytest.raises(SystemExit, match="another process"):
            launches.make_launches(todo, harness.store.Store(store.path), noisy=True)


def made_up_runs(harness, study, arrival_of):
    """Runs whose test error falls in a line to 0.1 at the step that `arrival_of` gives for a cell, and stays there."""
    runs = {}
    for cell in study.cells:
        steps_of = [(rate, 0, cell.rung) for rate in cell.rates] + [(cell.rates[1], n, cell.steps) for n in range(3)]
        for rate, seed, steps in steps_of:
            at = arrival_of(cell) * (1 + 0.01 * seed)
            curve = [[0, None, 2.0, 0.9], [at, 1.0, 0.5, 0.1], [max(steps, at), 1.0, 0.5, 0.1]]
            record = {"cell": cell.name, "seed": seed, "steps": steps, "curve": curve, "diverged": None,
                      "validation": abs(rate - cell.rates[1]), "noisy": False,
                      "seconds a step": {"wall": 1.0, "cpu": 1.0}, "machine": MACHINE,
                      "versions": VERSIONS}  # fmt: skip
            runs[harness.cells.key_of(cell.name, rate, seed, steps)] = record
    return runs


MACHINE = {"processor": "made up", "cores": 2, "threads": 1}
VERSIONS = {"python": "3", "torch": "2", "stretto": "0", "commit": "none"}


def made_up_launches(study, seconds_of, **changed):
    """Launches that measured what `seconds_of` gives, 1 % longer in each."""
    return {
        each.key: {"key": each.key, "noisy": False, "others": [0.0, 0.1], "machine": MACHINE,
                   "figures": {name: value * (1 + 0.01 * each.number) for name, value in seconds_of(each).items()},
                   **changed}
        for each in study.launches
    }  # fmt: skip


def test_the_page_by_the_clock_is_made_of_runs_and_launches(harness):
    """Synchronous ways need 360 steps, local ones 180; the best synchronous one takes 0.1 s, local ones 0.12."""
    clock = importlib.import_module("by_the_clock")
    pb = {2: "pb", 4: "pb"}
    chunks = {2: "chunked(chunks=2)", 4: "chunked(chunks=4)"}
    methods = {"asynchronous": {"A": pb, "B": pb}, "local": {"A": {2: "greedy", 4: "greedy"}, "B": chunks}}
    study = clock.study(methods)
    runs = made_up_runs(harness, study, lambda cell: 180 if "local" in cell.name else 360)

    def seconds_of(launch):
        return {"seconds a step": 0.12 if "local" in launch.name else 0.1 if "1f1b" in launch.name else 0.2}

    page = harness.page.page(study, runs, made_up_launches(study, seconds_of))
    assert "Not finished" not in page
    told = "3.33 in every run as one process, 3.33 in every run as DistributedDataParallel, 1.67 in every run as 1f1b, "
    assert f"| **reached** | local: {told}" in page
    assert "| local, `chunked(chunks=4)` | 121 [" in page
    assert "undecided (more processes than cores) | 0.10 |" in page.split("### B, 4 processes, loopback")[1]
    noisy = harness.page.page(study, runs, made_up_launches(study, seconds_of, noisy=True))
    assert f"| **undecided (noisy)** | local: ~{told}" in noisy
    assert f"{len(study.launches)} launches are missing" in noisy
    refused = made_up_launches(study, seconds_of)
    refused = {key: {**record, "refused": "no"} if "Mbit" in key else record for key, record in refused.items()}
    predicted = 120 * 1.01 + 4 * 16 * 64 * 128 * 8 / 100e3  # ms: loopback and a stage's activations
    row = next(line for line in harness.page.page(study, runs, refused).split("### B, 2 processes, 100")[1].split("\n")
               if line.startswith("| local"))  # fmt: skip
    assert row.startswith(f"| local, `chunked(chunks=2)` | p{predicted:.3g} [")


def test_study_five_measures_what_the_advice_stood_for(harness):
    study = importlib.import_module("by_the_clock").STUDY
    assert (study.base_runs, len(study.launches)) == (70, 192)
    for cell in study.cells:
        chosen = stretto.method(cell.method)
        chosen.plan(cell.settings["stages"])
        assert (
            chosen.family
            == {"synchronous": "synchronous", "asynchronous": "asynchronous", "local": "local"}[
                cell.name.split(", ")[1]
            ]
        )


def test_the_page_of_the_lecture_is_made_of_runs_and_launches(harness):
    study, parts = importlib.import_module("lecture").STUDY, importlib.import_module("lecture_parts.launches")
    runs = made_up_runs(harness, study, lambda cell: 360)

    def figures_of(launch):
        if launch.name.startswith("spatial"):
            return {"forward": 1 / launch.processes, "step": 1.0}
        if launch.name.startswith("bytes"):
            return {"bytes": 7.0}
        if launch.name.startswith("utilisation"):
            return {f"{what}, {b}": (1 + b) * (1.1 if what == "predicted" else 1)
                    for what in ("measured", "predicted") for b in parts.BATCHES}  # fmt: skip
        return {"seconds a step": 0.1 if launch.name == "local SGD" else 0.2}

    launches = made_up_launches(study, figures_of)
    for each in study.launches:
        if each.name == "bytes, data":
            launches[each.key]["figures"]["bytes"] = parts.bytes_by_formula("data")
    page = harness.page.page(study, runs, launches)
    assert "Not finished" not in page
    even = "1010 [985, 1040] | 1 in every run, undecided | 1 in every run, undecided"
    assert f"| 2 | 505 [493, 518] | 2 in every run, faster | 2 in every run, faster | {even} | 0.10 |" in page
    assert "| 4 | 252 [246, 259] | 4 in every run, undecided (more processes than cores) | " in page
    assert "| 1 of 2 threads | 1010 [985, 1040] |  |  | " in page
    assert "| 1 | 2020 [1970, 2070] | 2220 | 10 in every run | 50 | 50 | " in page
    assert "Mean error of the prediction 10.0 %, the largest 10.0 %" in page
    assert "| data | 109,643,232 | 109,643,232 | equal |" in page
    assert "| operator | 7; 7; 7 | 17,021,440 | **not equal** |" in page
    assert page.count("| 0.5 in every run, sooner | soonest by its mean |") == len(parts.LINKS)


def test_the_formula_of_bytes_has_the_layers_of_alexnet(harness):
    import torch

    parts, tasks = (importlib.import_module(f"lecture_parts.{name}") for name in ("launches", "tasks"))
    model, sizes = tasks.alexnet(), []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            layer.register_forward_hook(lambda layer, given, out: sizes.append((given[0].numel(), out.numel())))
    model(torch.zeros(1, *parts.IMAGE))
    layers = [layer for layer, _ in parts.alexnet_layers()]
    assert [(layer.inputs, layer.outputs) for layer in layers] == sizes
    parameters = list(model.parameters())
    assert sum(layer.size for layer in layers) == sum(p.numel() for p in parameters)
    assert parts.bytes_by_formula("data") == 4 * (sum(p.numel() for p in parameters) + len(parameters))
    mlp = importlib.import_module("harness.examples").made_up((1, 28, 28), 10)
    whole = [make() for make in tasks.mlp(mlp, width=parts.WIDTH)]
    assert sum(p.numel() for block in whole for p in block.parameters()) == parts.PARAMETERS


@pytest.mark.slow
def test_every_way_is_launched_on_two_processes(harness, tmp_path):
    """Three steps of each of setting A, over loopback; bytes; and one over a link, where links are allowed."""
    clock, lecture = importlib.import_module("by_the_clock"), importlib.import_module("lecture")
    a, b = {2: "pb-lwp-sc", 4: "pb"}, {2: "greedy", 4: "greedy"}
    methods = {"asynchronous": {"A": a, "B": a}, "local": {"A": b, "B": b}}
    first = [each for each in clock.study(methods).launches + lecture.STUDY.launches if each.number == 0]
    here = [
        each
        for each in first
        if each.processes == 2 and each.link is None and each.name.startswith(("A, ", "bytes, data", "bytes, operator"))
    ]
    over = [each for each in first if each.name == "local SGD" and each.link == 400]
    store = harness.store.Store(tmp_path / "launches.jsonl")
    harness.launches.make_launches([*here, *over], store, noisy=True, steps=3)
    found = {record["name"]: record for record in store.read().values()}
    assert all(record["figures"]["seconds a step"] > 0 for name, record in found.items() if name.startswith("A, "))
    parts = importlib.import_module("lecture_parts.launches")
    for way in ("data", "operator"):
        # but for a digest of each batch that is compared
        assert found[f"bytes, {way}"]["figures"]["bytes"] == pytest.approx(parts.bytes_by_formula(way), rel=1e-4)
    assert len(store.read()) == len(here) + 1
