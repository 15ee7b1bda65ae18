"""Methods by name: options, round trips, and what is refused."""

import pytest

import stretto
from stretto.errors import UsageError
from stretto.methods import METHODS
from stretto.options.named import split_list
from stretto.schedule import Reach


def test_the_names_that_stay_put():
    assert {"backprop", "greedy", "overlapping", "chunked"} <= set(METHODS)
    for name in METHODS:
        made = stretto.method(name)
        assert (made.name, str(made)) == (name, name)
        assert made.summary


@pytest.mark.parametrize("text", [
    "greedy", "greedy(head=linear)", "overlapping(delay=1)", "overlapping(combine=mean, delay=1)",
    "chunked(chunks=4)", "chunked(chunks=3, head=pooled)",
])  # fmt: skip
def test_written_and_read_back(text):
    made = stretto.method(text)
    assert str(made) == text
    again = stretto.method(str(made))
    assert (again.options, again.name, again.weights, again.combine, again.head) == (
        made.options, made.name, made.weights, made.combine, made.head,
    )  # fmt: skip
    for size in range(max(made.options.get("chunks", 1), 1), 7):
        assert again.plan(size) == made.plan(size)


@pytest.mark.parametrize("text", [
    "chunked(chunks=4)", " chunked ( chunks = 4 ) ", "chunked(chunks=4,)",
])  # fmt: skip
def test_ways_to_write_the_same(text):
    assert stretto.method(text).plan(6) == stretto.method("chunked", chunks=4).plan(6)
    assert stretto.method("overlapping(combine='mean')").combine == stretto.method("overlapping(combine=mean)").combine
    assert stretto.method("greedy()").plan(3) == stretto.method("greedy").plan(3)


def test_keywords_win_over_what_is_written():
    assert stretto.method("chunked(chunks=4, head=linear)", chunks=2).options == {"chunks": 2, "head": "linear"}


@pytest.mark.parametrize(("name", "options", "message"), [
    ("gredy", {}, "unknown method 'gredy': did you mean 'greedy'"),
    ("xyzzy", {}, "unknown method 'xyzzy': choose from .*backprop"),
    ("", {}, "unknown method ''"),
    ("greedy", {"delay": 1}, "method 'greedy' has no option 'delay'"),
    ("chunked(chunk=3)", {}, "method 'chunked' has no option 'chunk': did you mean 'chunks'"),
    ("overlapping", {"dealy": 1}, "did you mean 'delay'"),
    ("backprop(haed=linear)", {}, "method 'backprop' has no option 'haed': did you mean 'head'.*Choose from head, "),
    ("overlapping(combine=max)", {}, r"overlapping\(combine='max'\): choose 'sum' or 'mean'"),
    ("overlapping(delay=2)", {}, r"overlapping\(delay=2\): choose 0 .* or 1"),
    ("overlapping(delay=-1)", {}, r"overlapping\(delay=-1\)"),
    ("chunked(chunks=0)", {}, r"chunked\(chunks=0\): a whole number of at least 1"),
    ("chunked(chunks=-2)", {}, "at least 1"),
    ("chunked(chunks=1.5)", {}, "a whole number"),
    ("chunked(chunks='2')", {}, "a whole number"),
    ("chunked(4)", {}, r"cannot read the method 'chunked\(4\)'.*option=value"),
    ("chunked(chunks=4", {}, "cannot read the method"),
    ("chunked(chunks=4))", {}, "cannot read the method"),
    ("chunked(chunks=)", {}, "cannot read the method"),
    ("chunked(chunks=len([1]))", {}, "cannot read the method"),
    ("chunked(**{})", {}, "cannot read the method|has no option"),
])  # fmt: skip
def test_refusals(name, options, message):
    with pytest.raises(UsageError, match=message):
        stretto.method(name, **options)


def test_more_chunks_than_stages():
    with pytest.raises(UsageError, match=r"chunked\(chunks=5\) on 4 stages: use at most 4 chunks"):
        stretto.method("chunked(chunks=5)").plan(4)
    assert stretto.method("chunked(chunks=5)").plan(1)[1].reach == Reach((0,))


def test_a_method_passes_through():
    made = stretto.method("chunked", chunks=3)
    assert stretto.method(made) is made
    with pytest.raises(UsageError, match=r"chunked\(chunks=3\) is a method already; its options chunks cannot"):
        stretto.method(made, chunks=4)


def test_where_heads_stand():
    expected = {
        "backprop": (None, None, None, None, 4),
        "greedy": (0, 0, 0, 0, 0),
        "overlapping": (None, 1, 1, 1, 1),
        "chunked": (None, None, 2, None, 1),
        "chunked(chunks=3)": (None, 1, None, 1, 0),
    }
    assert {name: stretto.method(name).plan(5)[1].reach.hops for name in expected} == expected
    assert all(stretto.method(name).plan(1)[1].reach.hops == (0,) for name in expected)


def test_lag():
    assert stretto.method("backprop").lag(5) == 0
    assert {stretto.method(name).lag(5) for name in ("greedy", "overlapping", "chunked")} == {10}


def test_a_list_of_methods_is_split_outside_parentheses():
    assert split_list("greedy, chunked(chunks=4, head=linear) ,backprop") == [
        "greedy", "chunked(chunks=4, head=linear)", "backprop",
    ]  # fmt: skip
    assert split_list("") == []
