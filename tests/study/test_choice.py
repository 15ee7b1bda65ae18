"""`all`: every method that can run, the others with their reason; what is named is run or refused."""

from dataclasses import replace

import pytest

from stretto import UsageError, advised
from stretto.methods import METHODS
from stretto.settings.runs import CompareSettings
from stretto.study import compare, open_study, read_study
from stretto.study.study import choose

SETTINGS = CompareSettings(
    model_options={"depth": 4, "width": 8}, steps=3, evaluations=1, methods=("all",), lr=(0.05,), batch_size=(32,),
    seeds=1,
)  # fmt: skip

FEW = ("backprop", "1f1b", "interleaved", "gpipe", "zb-v", "nesterov", "pb", "pb-sc", "pb-lwp", "spectrain", "chunked")
TABLES = {"three": ("backprop", "pb", "nesterov"), "few": FEW, "every": tuple(METHODS)}
EVERY = pytest.param("every", marks=pytest.mark.slow)


@pytest.fixture(params=["few", EVERY])
def table(request, monkeypatch):
    """The names of the methods that there are: some, of which any may be left out for its reason, or every one."""
    names = TABLES[request.param]
    monkeypatch.setattr("stretto.study.study.METHODS", {name: METHODS[name] for name in names})
    return names


def chosen(**changes):
    choice = choose(replace(SETTINGS, **changes))
    return choice.settings.methods, choice.left_out


def test_all_is_every_method_that_runs():
    methods, left_out = chosen()
    assert methods == tuple(name for name in METHODS if name not in left_out)
    assert set(left_out) == {"nesterov"}
    assert "built on torch.optim.NAdam; this optimizer is SGD" in left_out["nesterov"]


@pytest.mark.usefixtures("table")
def test_the_optimizer_decides():
    methods, left_out = chosen(optimizer="nadam")
    assert "nesterov" in methods
    assert set(left_out) == {"pb-lwp", "spectrain"}
    assert all("torch.optim.SGD" in reason for reason in left_out.values())


@pytest.mark.usefixtures("table")
def test_stages_and_batch_size_decide():
    _, left_out = chosen(stages=3)
    assert left_out["zb-v"].startswith("zb-v wants two stages for each worker")
    assert left_out["interleaved"] == "the same as 1f1b where stages=3"
    _, left_out = chosen(batch_size=(2, 32))
    assert "cuts a minibatch into 4 micro-batches, and batch_size=2" in left_out["gpipe"]
    assert "pb" not in left_out


def test_all_beside_named_methods(table):
    methods, left_out = chosen(methods=("pb(spike=True)", "all", "chunked( chunks=2 )"))
    assert methods[0] == "pb(spike=True)"
    assert methods[-1] == "chunked(chunks=2)"
    assert methods[1:-1] == tuple(name for name in table if name not in left_out)
    assert left_out["pb-sc"] == "the same as pb(spike=True) where stages=4"
    assert left_out["chunked"] == "the same as chunked(chunks=2) where stages=4"


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("async", "spectrain", "all"), marks=pytest.mark.slow),
        ("all", "async", "local", "chunked(chunks=2)"),
    ],
)
def test_all_beside_words_and_what_they_stand_for(asked, table):
    named = [str(advised(name, "sgd", 4)) for name in asked if name != "all"]
    methods, left_out = chosen(methods=asked, optimizer="sgd", momentum=0.9)
    assert len({*methods}) == len(methods)
    assert [name for name in methods if name in named] == [*dict.fromkeys(named)]
    assert {*methods} >= {name for name in table if name not in left_out}


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"methods": ("all", "nesterov")}, "built on torch.optim.NAdam"),
        ({"methods": ("all", "zb-v"), "stages": 3}, "zb-v wants two stages"),
        ({"methods": ("gpipe",), "batch_size": (2,)}, "cuts a minibatch into 4 micro-batches"),
        ({"methods": ("all", "all")}, "methods lists 'backprop' twice"),
        ({"methods": ("all", "gredy")}, "unknown method 'gredy'"),
        ({"batch_size": (5000,)}, "no method can run on these settings: batch_size=5000"),
    ],
)
def test_what_is_named_is_refused(wrong, message):
    with pytest.raises(UsageError) as error:
        chosen(**wrong)
    assert message in str(error.value)


def test_all_that_are_refused_are_named_at_once():
    methods = ("backprop", "pb-lwp", "1f1b", "spectrain", "nesterov")
    with pytest.raises(UsageError) as error:
        chosen(methods=methods, optimizer="adamw")
    first, second = str(error.value).splitlines()
    assert first.startswith("pb-lwp, spectrain: velocity prediction wants torch.optim.SGD")
    assert second.startswith("nesterov: method nesterov is built on torch.optim.NAdam")


def test_what_no_method_can_do_is_said_once():
    with pytest.raises(UsageError, match=r"^batch_size=5000"):
        chosen(methods=("backprop", "1f1b", "greedy"), batch_size=(5000,))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("table", ["three", EVERY], indirect=True)
def test_a_study_of_all_is_found_again_and_remembers_what_was_left_out(tmp_path, table):
    small = replace(SETTINGS, stages=2, methods=("all", "backprop"), model_options={"depth": 2, "width": 4})
    outcome = compare(open_study(small, tmp_path / "s"), jobs=1)
    assert outcome.failures == ()
    assert {record.method for record in outcome.records} == set(table) - set(outcome.left_out)
    assert open_study(small, tmp_path / "s").pending == []
    again = read_study(tmp_path / "s")
    assert again.left_out == outcome.left_out == outcome.to_json()["left_out"]
    page = outcome.report.read_text()
    assert "<b>nesterov</b>: method nesterov is built on torch.optim.NAdam" in page
    assert '<section id="cures">' in page
