"""A schedule, a method and a head in files of their own, as CONTRIBUTING.md shows them: every command knows them."""

import json
import re
from pathlib import Path

import pytest

import stretto
from cli import counted_costs
from pages import write_files
from stretto.cli import main
from stretto.errors import UsageError
from stretto.heads.table import HEADS
from stretto.methods import METHODS
from stretto.plan.planned_methods import names_of, planned
from stretto.schedule import Reach, Rules, check, draw
from stretto.simulate import simulate

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
SMALL = ["--model-options.width", "8", "--model-options.depth", "3", "--steps", "6", "--evaluations", "2"]
MLP = [*SMALL, "--stages", "3", "--lr", "0.05"]


@pytest.fixture(scope="module", autouse=True)
def _counted_once():
    with counted_costs.counted_once():
        yield


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    """The files of the page, in the current folder."""
    monkeypatch.chdir(tmp_path)
    assert write_files(PAGE, tmp_path) == ["turns.py", "cautious.py", "narrow.py"]


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    assert main([*words]) == 2
    return " ".join(capsys.readouterr().err.split())


def losses(capsys, method, *words):
    told = answer(capsys, "train", *MLP, "--method", method, *words, "--out", f"runs/{method}{len(words)}")
    return told["train_loss"], told["test_loss"]


def test_the_schedule_is_complete_and_drawn_as_its_file_begins():
    schedule, _ = stretto.method("turns.py:turns").plan(2)
    check(schedule, Rules.of(schedule, Reach((None, 1))))
    assert draw.text(simulate(*stretto.method("turns.py:turns").plan(2), 2).spans) in Path("turns.py").read_text()


@pytest.mark.parametrize("name", ["turns.py:turns", "cautious.py:cautious(part=0.8)", "greedy(head=narrow.py:narrow)"])
def test_show_and_simulate(capsys, name):
    shown = answer(capsys, "show", name, "--stages", "3")
    simulated = answer(capsys, "simulate", "--method", name, "--stages", "3")
    assert shown["method"] == simulated["method"] == name
    assert shown["workers"] == len(simulated["workers"]) == 3


@pytest.mark.parametrize(("name", "same"), [
    ("turns.py:turns", "backprop"),
    ("cautious.py:cautious(part=1)", "pb-lwpw"),
    ("cautious.py:cautious(part=0)", "pb"),
])  # fmt: skip
def test_trained_as_the_built_in_method_that_it_equals(capsys, name, same):
    assert losses(capsys, name) == losses(capsys, same)


@pytest.mark.parametrize("name", ["cautious.py:cautious(part=0.5)", "greedy(head=narrow.py:narrow(width=4))"])
def test_trained_on_processes_of_their_own(capsys, name):
    alone, together = losses(capsys, name), losses(capsys, name, "--workers", "2")
    assert alone == together


def test_a_finished_run_is_told_again(capsys):
    words = ["train", *MLP, "--method", "cautious.py:cautious", "--checkpoint-every", "2", "--out", "run"]
    assert answer(capsys, *words) == answer(capsys, *words, "--resume")


@pytest.mark.usefixtures("plain_pages")
def test_compared(capsys):
    names = ["backprop", "turns.py:turns", "cautious.py:cautious(part=0.5)", "greedy(head=narrow.py:narrow(width=4))"]
    words = ["compare", *SMALL, "--stages", "3", "--lr", "0.05", "--batch-size", "32", "--seeds", "1", "--jobs", "2",
             "--out", "study", "--methods", *names]  # fmt: skip
    told = answer(capsys, *words)
    assert [run["method"] for run in told["runs"]] == names
    assert [run["options"].get("part") for run in told["runs"]] == [None, None, 0.5, None]
    assert told["runs"][0]["test_loss"] == told["runs"][1]["test_loss"] != told["runs"][2]["test_loss"]
    assert "cautious.py:cautious" in Path(told["report"]).read_text()
    assert "nothing that a file says is executed" in refused(capsys, "report", "study")
    assert answer(capsys, *words)["runs"] == told["runs"]  # the finished runs once more


def test_planned_as_the_built_in_method_that_it_equals(capsys):
    words = ["plan", "--model", "mlp", "--cluster", "16-workstations", "--workers", "8", "--stages", "4,8"]
    own = answer(capsys, *words, "--methods", "cautious.py:cautious(part=0.5)")
    same = answer(capsys, *words, "--methods", "pb-lwpw")
    assert own["chosen"] == same["chosen"] | {"method": "cautious.py:cautious(part=0.5)"}
    assert own["predicted"] == same["predicted"]


def test_a_plan_is_trained_where_the_command_names_the_method(capsys):
    answer(capsys, "plan", "--model", "mlp", "--cluster", "16-workstations", "--workers", "2", "--stages", "2",
           "--methods", "cautious.py:cautious")  # fmt: skip
    words = ["train", "--plan", "plan.toml", *SMALL[4:], "--out", "run"]
    assert "nothing that a file says is executed" in refused(capsys, *words)
    assert "nothing that a file says is executed" in refused(capsys, "show", "--plan", "plan.toml")
    told = answer(capsys, *words, "--method", "cautious.py:cautious")
    assert told["steps"] == 6


def test_a_method_that_says_nothing_of_planning_is_refused_by_name(capsys):
    words = ["plan", "--model", "mlp", "--cluster", "16-workstations", "--methods"]
    told = refused(capsys, *words, "turns.py:turns")
    assert "cannot plan for method 'turns.py:turns': its Method has no closed forms" in told
    assert "microbatches is for the plan to choose" in refused(capsys, *words, "gpipe(microbatches=4)")
    assert "plans call it 'overlapping'" in refused(capsys, *words, "overlapping(delay=1)")


@pytest.mark.parametrize(("file", "text"), [
    ("run.toml", 'method = "called.py:called"'),
    ("run.toml", 'method = "greedy(head=called.py:called)"'),
    ("plan.toml", '[train]\nmethod = "called.py:called"\n[predicted]\n'
     '[plan]\nmethod = "called.py:called"\nstages = 2\npipeline = 2\n'),
])  # fmt: skip
def test_nothing_that_a_file_names_is_called(capsys, file, text):
    Path("called.py").write_text("raise SystemExit('called')\n")
    Path(file).write_text(text)
    commands = [["train", file]] if file == "run.toml" else [["train", "--plan", file], ["show", "--plan", file]]
    for words in commands:
        told = refused(capsys, *words)
        assert "called.py:called" in told
        assert "nothing that a file says is executed" in told


def test_a_run_folder_whose_method_is_a_function_is_not_opened(capsys):
    Path("called.py").write_text("raise SystemExit('called')\n")
    losses(capsys, "pb")
    run = Path("runs/pb0/run.json")
    run.write_text(run.read_text().replace('"pb"', '"called.py:called"'))
    assert "nothing that a file says is executed" in refused(capsys, "report", "runs/pb0")


MISTAKES = {
    "own.py:none": "own.py has no 'none'",
    "nowhere.py:made": "method 'nowhere.py:made': there is no file nowhere.py",
    "own.py:number": "method 'own.py:number' is 3: give a function with keyword-only options that returns",
    "own.py:takes": "method 'own.py:takes' takes width: give a function",
    "own.py:text": "method 'own.py:text' returned 'pb': give a function",
    "own.py:breaks": "method 'own.py:breaks' failed with KeyError: 'width'",
    "own.py:early(depth=3)": "method 'own.py:early' has no option 'depth'",
    "own.py:old": "schedule 'own.py:old' on 3 stages works on a minibatch for 4 more turns",
    "own.py:empty": "method 'own.py:empty' returned None: give a function",
}
OWN = """
import stretto
from stretto.schedule.library.pipedream import pipelined_backprop
number = 3
def takes(width): ...
def text(): return "pb"
def breaks(): return {}["width"]
def early(): return stretto.method("pb")
def old(num_stages, num_workers): return pipelined_backprop(num_stages, num_workers)
def empty(num_stages, num_workers): ...
def cut(num_stages, num_workers, microbatches): return stretto.method("gpipe", microbatches=microbatches).schedule(
    num_stages, num_workers)
def head(site): return 3
"""


@pytest.mark.parametrize(("name", "message"), MISTAKES.items())
def test_mistakes_are_told_by_the_functions_name(name, message):
    Path("own.py").write_text(OWN)
    with pytest.raises(UsageError, match=re.escape(message)):
        stretto.method(name).plan(3)


def test_a_schedule_of_micro_batches_takes_as_many_as_it_is_told(capsys):
    Path("own.py").write_text(OWN)
    assert stretto.method("own.py:cut").plan(3) == stretto.method("gpipe").plan(3)
    assert stretto.method("own.py:cut(microbatches=6)").plan(3) == stretto.method("gpipe(microbatches=6)").plan(3)
    assert answer(capsys, "show", "own.py:cut", "--stages", "3", "--microbatches", "7")["microbatches"] == 7


def test_a_head_that_is_no_module(capsys):
    Path("own.py").write_text(OWN)
    told = refused(capsys, "train", *MLP, "--method", "greedy(head=own.py:head)")
    assert "head 'own.py:head' returned 3: return an nn.Module" in told


def test_a_changed_file_is_read_again():
    Path("own.py").write_text(OWN)
    assert stretto.method("own.py:early").summary == stretto.method("pb").summary
    Path("own.py").write_text(OWN.replace('"pb")', '"pipedream")'))
    assert stretto.method("own.py:early").summary == stretto.method("pipedream").summary
    assert planned("own.py:early").family == "asynchronous"


@pytest.fixture
def _tables(monkeypatch):
    monkeypatch.setattr("stretto.methods.table.METHODS", METHODS)
    before = dict(METHODS), dict(HEADS)
    yield
    for table, kept in zip((METHODS, HEADS), before, strict=True):
        table.clear()
        table.update(kept)


@pytest.mark.usefixtures("_tables")
def test_registered_under_a_name():
    @stretto.methods.register("timid")
    def timid(*, spike: bool = False):
        """PB, by another name."""
        return stretto.method("pb", spike=spike)

    assert str(stretto.method("timid(spike=True)")) == "timid(spike=True)"
    assert "timid" in names_of(("asynchronous",))
    assert stretto.method("timid").plan(4) == stretto.method("pb").plan(4)
    stretto.methods.register("timid")(timid)  # as a notebook's cell that is run again
    with pytest.raises(UsageError, match=r"there is a method 'pb' already, stretto.methods.pipelined_backprop.pb"):
        stretto.methods.register("pb")(timid)
    with pytest.raises(UsageError, match="method name 'a b': give letters, digits and hyphens"):
        stretto.methods.register("a b")


@pytest.mark.usefixtures("_tables")
def test_a_head_registered_under_a_name(capsys):
    from stretto.options.import_object import import_object

    build = stretto.heads.register("narrow")(import_object("narrow.py:narrow"))
    assert losses(capsys, "greedy(head=narrow)") == losses(capsys, "greedy(head=narrow.py:narrow)")
    stretto.heads.register("narrow")(build)
    with pytest.raises(UsageError, match="there is a head 'linear' already"):
        stretto.heads.register("linear")(build)
