"""The rows of benchmarks/published: what they measured in seconds, and that as many are held out as looked at."""

import importlib.util
import sys
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
    seen, unseen = rows.read_rows(held_out=False), rows.read_rows(held_out=True)
    assert len(seen) == len(unseen)
    commands = [row.command for row in (*seen, *unseen)]
    assert len(set(commands)) == len(commands)
    assert {row.source for row in seen} == {row.source for row in unseen}


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [("seconds", 1.5, 1.5), ("examples_per_second", 64, 0.5), ("examples_per_second_per_gpu", 16, 0.25),
     ("tokens_per_second_per_gpu", 800, 0.5)],
)  # fmt: skip
def test_seconds_of_a_step_from_what_a_source_prints(rows, unit, value, seconds):
    options = {"cluster": "8-a100", "batch-size": 32, "workers": 8}
    entry = {"name": "a", "source": "b", "place": "c", "measured": {unit: value}, "options": {}}
    row = rows.row_of(entry, {"options": options, "tokens": 100})
    assert row.seconds == seconds
    assert row.command == "stretto plan --all-workers --cluster 8-a100 --batch-size 32 --workers 8 --json"
    with pytest.raises(ValueError, match="furlongs"):
        rows.row_of(entry | {"measured": {"furlongs": 1}}, {"options": options})
