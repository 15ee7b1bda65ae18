"""The rows of benchmarks/published: what they measured in seconds, and that enough are held out, none of them twice."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks" / "published"


@pytest.fixture(scope="module")
def rows():
    spec = importlib.util.spec_from_file_location("published_rows", FOLDER / "rows.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_as_many_rows_are_held_out_as_looked_at_and_none_is_both(rows):
    seen, unseen, new, third, fourth = (rows.read_rows(file) for file in rows.FILES)
    assert len(seen) == len(unseen)
    assert len(new) >= len(seen) + len(unseen)
    assert len(third) >= 34
    assert not {row.source for row in third} & {row.source for row in (*seen, *unseen, *new)}
    assert len(fourth) >= 60
    assert sum("model-options.context" in row.options for row in fourth) >= 30
    assert not {row.source for row in fourth} & {row.source for row in (*seen, *unseen, *new, *third)}
    every = [*seen, *unseen, *new, *third, *fourth]
    assert len({row.name for row in every}) == len(every)
    assert len({(row.source, row.command) for row in every}) == len(every)
    assert {row.source for row in seen} == {row.source for row in unseen}


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [("seconds", 1.5, 1.5), ("examples_per_second", 64, 0.5), ("examples_per_second_per_gpu", 16, 0.25),
     ("tokens_per_second", 6400, 0.5), ("tokens_per_second_per_gpu", 800, 0.5)],
)  # fmt: skip
def test_seconds_of_a_step_from_what_a_source_prints(rows, unit, value, seconds):
    options = {"cluster": "8-a100", "batch-size": 32, "workers": 8, "model-options.context": 100}
    entry = {"name": "a", "source": "b", "place": "c", "measured": {unit: value}, "options": {}}
    row = rows.row_of(entry, {"options": options})
    assert row.seconds == seconds
    assert row.command == (
        "stretto plan --all-workers --cluster 8-a100 --batch-size 32 --workers 8 --model-options.context 100 --json"
    )
    with pytest.raises(ValueError, match="furlongs"):
        rows.row_of(entry | {"measured": {"furlongs": 1}}, {"options": options})


def test_seconds_of_a_step_from_flops_are_those_that_its_source_says(rows):
    # Megatron-LM's README of 2021: GPT-3 on 1,024 A100, batch 1,536, 138 teraFLOP/s each, "around 32 seconds".
    options = {
        "model-options.depth": 96, "model-options.width": 12288, "model-options.context": 2048,
        "model-options.vocabulary": 51200, "workers": 1024, "batch-size": 1536, "cluster": "70-nodes-of-8-a100",
    }  # fmt: skip
    entry = {"name": "a", "source": "b", "place": "c", "measured": {"teraflops_per_second_per_gpu": 138}, "options": {}}
    again = rows.row_of(entry, {"options": options, "flops": "narayanan"}).seconds
    assert again == pytest.approx(32, abs=0.5)
    once = rows.row_of(entry, {"options": options, "flops": "dao"}).seconds  # without the second forward
    assert once == pytest.approx(again * 3 / 4, rel=0.01)


def test_flops_of_products_alone_are_those_that_the_source_counts_a_stage(rows):
    # sail-sg/VocabularyParallelism, artifact/exp_one_host.csv, base, 256,000 words, 2,048 tokens: 128 forwards.
    options = {
        "model-options.depth": 32, "model-options.width": 3072, "model-options.context": 2048,
        "model-options.vocabulary": 256000, "workers": 8, "batch-size": 128, "cluster": "8-a100",
    }  # fmt: skip
    flops = 3 * (7 * 263882790666240 + 676199651082240)
    measured = {"percent_of_312_teraflops_per_gpu": 50}
    entry = {"name": "a", "source": "b", "place": "c", "measured": measured, "options": {}}
    row = rows.row_of(entry, {"options": options, "flops": "yeung"})
    assert row.seconds == pytest.approx(flops / (8 * 156e12), rel=1e-12)


def test_a_command_is_checked_without_a_prediction(rows, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setitem(sys.modules, "rows", rows)
    check = importlib.import_module("command_check")
    whole = rows.read_rows("rows.toml")[0]
    assert check.complaints([whole]) == []
    for options, said in (
        ({"workers": 16}, "1 x 8 x 1 replicas"),
        ({"workers": 5600, "data-parallel": 700, "batch-size": 700}, "5600 workers; the cluster has 560"),
        ({"batch-size": 5, "microbatches": 2}, "5 examples"), ({"sharding": "zero"}, "sharding = 'zero'"),
        ({"pipeline": 2, "tensor": 4}, "without a method"), ({"model-options.depths": 3}, "depths"),
        ({"cluster": "8-b200"}, "8-b200"), ({"methods": "two-phase"}, "two-phase"),
        ({"pipeline": 2, "tensor": 4, "methods": "1f1b", "stages": 3}, "3 stages"),
    ):  # fmt: skip
        (complaint,) = check.complaints([replace(whole, options={**whole.options, **options})])
        assert complaint.startswith("GPT 22B, full recomputation: ")
        assert said in complaint
    sys.modules.pop("command_check")
