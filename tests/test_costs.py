"""What judges the tests themselves: costs.py, leftovers.py and missing_extras.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import costs

ROWS = [
    ["tests/a.py::test_old[1]", 1, 40, 0, 0.2],
    ["tests/a.py::test_old[2]", 1, 50, 0, 0.2],
    ["tests/b.py::test_new", 3, 0, 7, 0.4],
]
TABLE = """test,processes,steps,examples,cpu,longest,reason
reference,0,0,0,0.05,0,
all,2,90,0,0.4,0,
tests/a.py::test_old,2,90,0,0.40,0.20,
"""
HARMLESS = """
def test_nothing():
    pass
"""
UNTIDY = """
import socket, subprocess, sys, tempfile

kept = []

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

def test_file():
    tempfile.mkstemp(prefix="forgotten")

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))
"""
LACKING = """
import pytest

import missing_extras

missing_extras.PACKAGES["no_such_package"] = "stretto[none]"


def test_imports():
    import no_such_package

def test_fails():
    assert 1 == 2
"""


@pytest.fixture
def on_record(tmp_path, monkeypatch):
    """A table and a budget of their own."""
    monkeypatch.setattr(costs, "TABLE", tmp_path / "costs.csv")
    monkeypatch.setattr(costs, "BUDGET", tmp_path / "budget.toml")
    costs.TABLE.write_text(TABLE)
    costs.BUDGET.write_text("# why\nprocesses = 5\nsteps = 90\nexamples = 7\n")


def test_every_long_test_has_its_reason():
    assert costs.without_reason() == []


def test_a_sum_above_its_budget_names_what_is_new(on_record):
    assert costs.over_budget(ROWS) == []
    first, most, last = costs.over_budget([*ROWS, ["tests/b.py::test_newer", 4, 0, 0, 0.1]])[:3]
    assert first == "processes: 9 where budget.toml allows 5. New since costs.csv:"
    assert (most.split(), last.split()) == (["4", "tests/b.py::test_newer"], ["3", "tests/b.py::test_new"])


def test_twice_the_cpu_on_record_is_too_much_whatever_the_machine(on_record, monkeypatch):
    monkeypatch.setattr(costs, "reference", lambda: 0.1)  # a machine half as fast
    monkeypatch.setattr(costs, "ONCE", 0)
    assert costs.too_slow([[name, p, s, e, 2 * cpu] for name, p, s, e, cpu in ROWS[:2]]) == []
    title, long, every = costs.too_slow([["tests/a.py::test_old[1]", 1, 40, 0, 3.0]])
    assert "this one takes 2.00 times as long" in title
    assert long.split() == ["1.50", "s,", "0.40", "on", "record:", "tests/a.py::test_old"]
    assert every.split()[:4] == ["1.50", "s,", "0.40", "on"]


def test_what_is_kept_is_read_again_with_its_reasons(on_record):
    costs.TABLE.write_text(TABLE + "tests/b.py::test_new,1,0,0,0.9,0.9,the only one of its kind\n")
    costs.write_table([*ROWS, ["tests/b.py::test_new[2]", 0, 0, 0, 0.6]])
    costs.write_budget(ROWS)
    table, reference, cpu = costs.read_table()
    assert list(table) == ["tests/a.py::test_old", "tests/b.py::test_new"]
    assert (reference > 0, cpu) == (True, 1.4)
    assert table["tests/b.py::test_new"]["reason"] == "the only one of its kind"
    assert costs.without_reason() == []
    assert costs.BUDGET.read_text() == "# why\nprocesses = 6\nsteps = 99\nexamples = 8\n"
    costs.write_table([["tests/c.py::test_long", 0, 0, 0, 0.8]])
    assert costs.without_reason() == [
        "tests/c.py::test_long takes 0.80 s: mark it slow, or give its reason in costs.csv"
    ]


def test_a_table_by_folder(tmp_path, monkeypatch, capsys):
    row = ["tests/cli/a.py::test", 1, 2, 3, 1.5]
    (tmp_path / "now").write_text(json.dumps({"rows": [row]}))
    (tmp_path / "then").write_text(json.dumps({"rows": [row, row]}))
    monkeypatch.setattr(sys, "argv", ["costs.py", str(tmp_path / "now"), str(tmp_path / "then")])
    costs.main()
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| tests/cli | 1 | 1 | 2 | 3 | 1.5 | 3.0 |", "| all | 1 | 1 | 2 | 3 | 1.5 | 3.0 |"
    ]  # fmt: skip


def tried(folder, text):
    """A run of pytest with our conftest.py over one file; its status and what it says."""
    file = folder / "test_it.py"
    file.write_text(text)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", here.parent / "pyproject.toml", "-rs"]
    environment = {**os.environ, "PYTHONPATH": str(here), "PYTEST_PLUGINS": "conftest"}
    done = subprocess.run([*command, file], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
def test_what_a_test_leaves_behind_fails_the_run_and_is_named(tmp_path):
    assert tried(tmp_path, HARMLESS)[0] == 0
    status, said = tried(tmp_path, UNTIDY)
    assert status == 1
    assert "3 passed" in said
    lines = [line for line in said.splitlines() if " leaves " in line]
    for line, words in zip(
        lines, ("test_port listening", "test_process sleep(60)", "test_file forgotten"), strict=True
    ):
        assert all(word in line for word in words.split())


@pytest.mark.slow
def test_what_needs_a_missing_package_is_skipped_by_name_and_nothing_else(tmp_path):
    status, said = tried(tmp_path, LACKING)
    assert status == 1
    assert "1 failed, 1 skipped" in said
    assert 'needs no_such_package, not installed here (pip install "stretto[none]")' in said
