"""Fewer cases than a full product of options, where the code has no case for combinations of all of them."""

from itertools import combinations, product

import pytest

ParameterSet = type(pytest.param())


def pairwise(*axes):
    """Cases, one value of each axis, in which any two values of two axes meet: greedily few, always the same."""
    every = list(product(*axes))
    left = {pair for case in every for pair in pairs(case)}
    chosen = []
    while left:
        best = max(every, key=lambda case: len(left & pairs(case)))
        chosen.append(best)
        left -= pairs(best)
    return chosen


def paired(*axes):
    """All cases; those that `pairwise` does without are slow tests."""
    few = pairwise(*axes)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in few)) for case in product(*axes)]


def pairs(case):
    return set(combinations(enumerate(case), 2))


def slow_where(slow, cases):
    """All cases, of which those that `slow` is true of are slow tests."""
    return [pytest.param(case, marks=[pytest.mark.slow] * bool(slow(case))) for case in cases]


def thinned(cases, every, first=0):
    """All cases; but for each `every`-th one, from the `first` on, they are slow tests."""
    params = [case if isinstance(case, ParameterSet) else pytest.param(*as_tuple(case)) for case in cases]
    return [
        pytest.param(*case.values, marks=[*case.marks, *[pytest.mark.slow] * (i % every != first)], id=case.id)
        for i, case in enumerate(params)
    ]


def as_tuple(case):
    return case if isinstance(case, tuple) else (case,)


def in_turn(many, few, rounds=1, slow=0):
    """Every one of `many` with as many of `few` as there are rounds, in turn; the last `slow` rounds are slow tests."""
    return [
        pytest.param(each, few[(i + n) % len(few)], marks=[pytest.mark.slow] * (n >= rounds - slow))
        for n in range(rounds)
        for i, each in enumerate(many)
    ]
