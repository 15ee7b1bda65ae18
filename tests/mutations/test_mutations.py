"""The faults fit today's source, and the script counts only what a test finds that passes without the fault."""

import ast
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from mutations import draw, run
from mutations.copies import Copy, Outcome, ended
from mutations.faults import DRAWN, HAND, ROOT, STRUCK, Fault, as_toml, every, excerpts, read

FAULT = Fault("late", "rules", "src/stretto/errors.py", 'says "when"', "a = 1\n", "a = 2\n")


@pytest.mark.parametrize("fault", every(), ids=lambda fault: fault.name)
def test_each_fault_stands_in_todays_source_once(fault):
    mutated = fault.applied()
    assert mutated != (ROOT / fault.file).read_text()
    compile(mutated, fault.file, "exec")
    assert all((ROOT / folder).is_dir() for folder in fault.likely)


def test_there_are_ten_of_each():
    assert len(read(HAND)) == len(read(DRAWN)) == 10
    assert len({fault.name for fault in every()}) == 20
    assert {fault.area for fault in read(DRAWN)} == set(draw.AREAS)


def test_what_is_struck_has_a_reason_and_is_not_drawn():
    entries = tomllib.loads(STRUCK.read_text())["fault"]
    assert all(len(entry["reason"].split()) > 5 for entry in entries)
    assert not {fault.key for fault in read(STRUCK)} & {fault.key for fault in read(DRAWN)}


def test_a_fault_that_no_longer_fits_is_named(tmp_path):
    (tmp_path / "src" / "stretto").mkdir(parents=True)
    (tmp_path / FAULT.file).write_text("a = 1\na = 1\n")
    with pytest.raises(ValueError, match=r"late: its `before` stands 2 times in src/stretto/errors\.py, not once"):
        FAULT.applied(tmp_path)


def test_a_fault_is_written_as_it_is_read(tmp_path):
    (tmp_path / "some.toml").write_text(as_toml(FAULT, operator="of ours"))
    assert read(tmp_path / "some.toml") == [FAULT]


@pytest.mark.parametrize("mutated", ["a\nb\nc\nB\n", "a\nB\nb\nc\nb\n", "a\nb\nb\n", "b\nc\nb\n", "a\nb\nc\n"])
def test_the_lines_that_differ_stand_in_the_source_once(mutated):
    source = "a\nb\nc\nb\n"
    before, after = excerpts(source, mutated)
    assert source.count(before) == 1
    assert source.replace(before, after) == mutated


SOURCE = """\
from a import b
Way = int | str

@d
def f(x: int | None, *, width: float = 1 * 2) -> list[int | str]:
    y: int | str = 1 + 2
    if x > 3:
        raise ValueError("too many: " + str(x - 4))
    assert y, "none of " + str(5)
    warnings.warn("late by " + str(6 - x))
    return mark_line(x - 7, strokeWidth=8)
"""


def test_what_is_no_behaviour_is_not_mutated():
    spans = draw.spans(ast.parse(SOURCE))
    texts = [SOURCE.splitlines()[line - 1][a:b] for (line, a), (_, b) in spans]
    assert sorted(texts) == sorted([
        "from a import b", "int | str", "int | None", "list[int | str]", "int | str", "float",
        'ValueError("too many: " + str(x - 4))', '"none of " + str(5)', 'warnings.warn("late by " + str(6 - x))', "8",
    ])  # fmt: skip


def test_each_area_is_drawn_once_and_two_twice(monkeypatch):
    numbers = count()

    def places(tool, area, seed):
        return (draw.Mutation("src/stretto/errors.py", area, next(numbers), (1, 0), (1, 1)) for _ in range(5))

    def fault(tool, mutation, name, area):
        return None if mutation.occurrence % 2 else FAULT

    monkeypatch.setattr(draw, "sequence", places)
    monkeypatch.setattr(draw, "as_fault", fault)
    areas = [tomllib.loads(entry)["fault"][0]["operator"] for entry in draw.drawn(3)]
    assert sorted(areas) == sorted([*draw.AREAS, *{area for area in areas if areas.count(area) == 2}])
    assert len(areas) == 10


class Played:
    """A copy whose runs of tests come to the given outcomes, one after the other."""

    def __init__(self, *outcomes):
        self.outcomes, self.asked = list(outcomes), []

    def put(self, fault):
        self.asked.append("put")

    def mend(self, fault):
        self.asked.append("mended")

    def tests(self, tier, jobs, what, limit):
        self.asked.append(list(what))
        return self.outcomes.pop(0)


PASSED, FAILED = Outcome([], None, 1.0, ""), Outcome(["t.py::a"], None, 1.0, "")
HUNG = Outcome([], ["t.py::slow"], 1.0, "")


@pytest.mark.parametrize(
    ("faulty", "clean", "found", "by", "reason"),
    [
        ([FAILED, FAILED], [PASSED], True, "t.py::a", "fails"),
        ([PASSED, FAILED, FAILED], [PASSED], True, "t.py::a", "fails"),
        ([PASSED, PASSED], [], False, "", ""),
        ([FAILED, PASSED, PASSED], [FAILED], False, "", ""),  # it fails without the fault
        ([FAILED, PASSED, PASSED, PASSED], [PASSED], False, "", ""),  # it does not fail again
        ([HUNG, HUNG], [PASSED], True, "t.py::slow", "hang"),
        ([HUNG, FAILED], [PASSED], True, "t.py::slow", "hang"),
        ([HUNG, PASSED, PASSED], [HUNG], False, "", ""),
        ([HUNG, PASSED, PASSED, PASSED], [PASSED], False, "", ""),
    ],
)
def test_a_test_finds_a_fault_if_it_passes_without_it_and_fails_with_it_twice(
    monkeypatch, faulty, clean, found, by, reason
):
    copies = {"faulty": Played(*faulty), "clean": Played(*clean)}
    monkeypatch.setattr(run, "Copy", lambda folder: copies[folder.name])
    search = run.Search(ROOT, "quick", 1, 60.0)
    verdict = search.look_for(read(HAND)[0], likely_only=False)
    assert (verdict.found, verdict.by, verdict.reason) == (found, by, reason)
    assert [copy.outcomes for copy in copies.values()] == [[], []]
    asked = copies["faulty"].asked
    assert (asked[0], asked[1], asked[-1]) == ("put", ["tests/schedule", "tests/laws"], "mended")
    if clean and not found:
        (name,) = faulty[0].failed or faulty[0].hung
        assert [f"--deselect={name}" in words for words in asked[-3:-1]] == [True, True]


def test_tests_of_which_none_begins_are_no_verdict(monkeypatch):
    copies = {"faulty": Played(Outcome([], [], 60.0, "said")), "clean": Played()}
    monkeypatch.setattr(run, "Copy", lambda folder: copies[folder.name])
    with pytest.raises(RuntimeError, match="no test began within 60 s:\nsaid"):
        run.Search(ROOT, "quick", 1, 60.0).look_for(read(HAND)[0], likely_only=False)
    assert copies["faulty"].asked[-1] == "mended"


def test_a_verdict_takes_the_place_of_the_former_one(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "RESULT", tmp_path / "result.json")
    first, second = (
        run.Verdict(each.name, each.area, each.file, each.what, True, "t.py", "fails", 1.0) for each in every()[:2]
    )
    for verdict in (second, first, replace(second, found=False)):
        run.keep("quick", verdict)
    table = json.loads((tmp_path / "result.json").read_text())["quick"]
    assert [(row["name"], row["found"]) for row in table["faults"]] == [(first.name, True), (second.name, False)]
    assert (table["found"], table["of"]) == (1, 20)


def test_tests_that_do_not_end_are_killed():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert ended(process, 0.1) is None
    assert process.returncode < 0


@pytest.mark.slow
def test_every_process_sees_the_fault(tmp_path):
    """Also one that is given a PYTHONPATH of its own, or is called as a command."""
    copy = Copy(tmp_path / "copy")
    source = (ROOT / FAULT.file).read_text()
    with_fault(copy, FAULT.file, f"{source}\nimport sys\nprint('the copy', file=sys.stderr)\n")
    for command in ([tmp_path / "copy" / ".venv" / "bin" / "stretto"], [copy.python, "-c", "import stretto.errors"]):
        told = subprocess.run(command, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=False)
        assert "the copy\n" in told.stderr


@pytest.mark.slow
def test_a_test_fails_as_long_as_the_fault_is_there(tmp_path):
    copy, file = Copy(tmp_path / "copy"), "src/stretto/schedule/even_split.py"
    with_fault(copy, file, (ROOT / file).read_text().replace("index < longer", "index <= longer"))
    assert copy.tests("quick", 0, ["tests/schedule/test_even_split.py"], 300).failed
    copy.mend(SimpleNamespace(file=file))
    assert copy.tests("quick", 0, ["tests/schedule/test_even_split.py"], 300).good


def with_fault(copy, file, source):
    copy.put(SimpleNamespace(file=file, applied=lambda: source))
