"""What the studies in experiments/ rest on."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stretto import study
from stretto.settings.runs import CompareSettings

DELAY = Path(__file__).parent.parent / "experiments" / "delay"
LARGE_BATCH = DELAY.parent / "large_batch"
STUDIES = DELAY.parent / "studies"


def test_networks_side_by_side_train_as_they_do_alone(monkeypatch, capsys):
    """Of the study of delay: one method for SGD, one for Adam; `main.py --check` does all."""
    monkeypatch.syspath_prepend(DELAY)
    import check
    import runs

    try:
        chosen = [run for run in runs.all_runs() if run.method in ("spectrain", "pipeoptim")]
        check.check(chosen, steps=4)
        assert len(capsys.readouterr().out.splitlines()) == 2
    finally:
        for name in ("check", "runs", "network"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.usefixtures("plain_pages")
def test_the_study_of_large_batches_tells_batch_sizes_apart(monkeypatch, tmp_path):
    """Its tables, from two tiny runs of one of its studies."""
    monkeypatch.syspath_prepend(LARGE_BATCH)
    import main

    try:
        few = {"examples": 256, "evaluations": 4, "batch_size": (16, 64), "lr": (0.01,), "seeds": 1}
        tiny = replace(main.STUDIES["lamb, sqrt"], model_options={"depth": 2, "width": 8}, **few)
        outcome = study.compare(study.open_study(tiny, tmp_path / "study"), jobs=1)
        found = main.figures(outcome.records)
        assert [each["batch"] for each in found["batches"]] == [16, 64]
        assert all(each["sharpness"] and each["diverged"] == 0 for each in found["batches"])
        assert main.table(found).splitlines()[2].startswith("| 16 | 0.01 |")
    finally:
        del sys.modules["main"]


@pytest.mark.slow
@pytest.mark.usefixtures("plain_pages")
def test_a_studys_figure_says_where_backprop_stands(monkeypatch, tmp_path):
    """From two tiny parts."""
    monkeypatch.syspath_prepend(STUDIES)
    import main

    try:
        for width in (8, 16):
            tiny = CompareSettings(
                model_options={"depth": 2, "width": width}, steps=8, evaluations=4, methods=("backprop", "greedy"),
                lr=(0.1,), batch_size=(32,), seeds=1,
            )  # fmt: skip
            study.compare(study.open_study(tiny, tmp_path / "s" / f"{width}"), jobs=1)
        monkeypatch.setattr(sys, "argv", ["main.py", str(tmp_path / "s"), "--out", str(tmp_path)])
        main.main()
        found = json.loads((tmp_path / "s.json").read_text())
        assert list(found) == ["8", "16"]
        places = {row["backprop"] for each in found.values() for row in each["cutoffs"]}
        assert places <= {"cheapest", "on the frontier", "dominated", "not reached"}
        assert (tmp_path / "s.svg").read_text().startswith("<svg")
    finally:
        del sys.modules["main"]
