"""The example: three lines make a script of plain Lightning one of two processes; the guide shows them."""

import difflib
import re
import runpy
import sys
from pathlib import Path

import pytest

from runtime.processes import ended, start
from test_projects import write_clothes

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore:::torch", "ignore::FutureWarning")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lightning"


def changes():
    scripts = [(EXAMPLE / name).read_text().splitlines()[1:] for name in ("plain.py", "own.py")]
    return [line for line in difflib.ndiff(*scripts) if line[0] in "+-" and line[1:].strip()]


def test_three_lines_differ_and_the_guide_shows_them():
    added = [line[1:].strip() for line in changes() if line[0] == "+"]
    assert len(added) == 3
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "guide" / "lightning.md").read_text(), re.DOTALL)
    assert [line[1:].strip() for line in shown.splitlines() if line[:1] == "+"] == added


@pytest.mark.slow
def test_both_train_alike(tmp_path, monkeypatch, capsys):
    clothes = str(write_clothes(tmp_path / "clothes", 300))
    folders = [tmp_path / "plain", tmp_path / "own"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    monkeypatch.setattr(sys, "argv", ["plain.py", clothes, "4"])
    runpy.run_path(str(EXAMPLE / "plain.py"), run_name="__main__")
    monkeypatch.chdir(folders[1])
    elastic = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PYTHONWARNINGS": "ignore"}
    statuses, said = ended(start(2, [sys.executable, str(EXAMPLE / "own.py"), clothes, "4"], extra=elastic), 200)
    assert statuses == [0, 0], "\n".join(said)
    tables = [rows((folder / "logs/lightning_logs/version_0/metrics.csv").read_text()) for folder in folders]
    assert tables[0].keys() == tables[1].keys()
    for name, values in tables[0].items():
        assert values == pytest.approx(tables[1][name], abs=1e-4), name
    assert (folders[1] / "checkpoints" / "last.ckpt").exists()


def rows(table):
    """The values of each column, without the empty ones."""
    names, *lines = [line.split(",") for line in table.splitlines()]
    return {name: [float(line[column]) for line in lines if line[column]] for column, name in enumerate(names)}
