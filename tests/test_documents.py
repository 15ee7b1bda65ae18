"""What the documents show must run as it stands."""

import re
import runpy
from pathlib import Path

import pytest

import stretto

ROOT = Path(__file__).parent.parent


def test_the_readmes_example_runs(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), found)
    assert isinstance(found["trainer"], stretto.Trainer)
    assert 0 < found["loss"] < 1.4  # below chance among four classes
    assert "'accuracy'" in capsys.readouterr().out


def test_the_readmes_picture_is_what_show_draws():
    from stretto.schedule import draw
    from stretto.simulate import simulate

    drawn = draw.text(simulate(*stretto.method("overlapping").plan(3), 3).spans)
    assert drawn in (ROOT / "README.md").read_text()


def test_the_recipe_for_a_schedule_works():
    from stretto.schedule import Reach, Rules, check

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    found: dict[str, object] = {}
    exec(compile(blocks[0], "CONTRIBUTING.md", "exec"), found)
    schedule = found["mine"](2, 2)
    check(schedule, Rules.of(schedule, Reach((None, 1))))


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_run(example, capsys):
    runpy.run_path(str(example))
    assert capsys.readouterr().out.count("accuracy") == 4


def test_every_method_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text()
    from stretto.methods import METHODS

    assert [name for name in METHODS if f"`{name}" not in text] == []
