"""Fewer cases than a full product of options, where the code has no case for combinations of all of them."""

from collections import Counter
from itertools import combinations, product

import pytest

ParameterSet = type(pytest.param())


def pairwise(*axes):
    """Cases, one value of each axis, in which any two values of two axes meet: greedily few, always the same."""
    every = {case: pairs(case) for case in product(*axes)}
    left = set().union(*every.values())
    chosen = []
    while left:
        best = max(every, key=lambda case: len(left & every[case]))
        chosen.append(best)
        left -= every[best]
    return chosen


def paired(*axes):
    """All cases; those that `pairwise` does without are slow tests."""
    return slow_but(pairwise(*axes), product(*axes))


def slow_but(few, cases):
    """All cases; but for a few of them they are slow tests."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in few)) for case in cases]


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


def each_once(cases):
    """All cases; but for a few in which each value of each axis comes, evenly, they are slow tests."""
    left, used, quick = {each for case in cases for each in enumerate(case)}, Counter(), []
    while left:
        new = [len(left & {*enumerate(case)}) for case in cases]
        rare = [-sum(used[each] for each in enumerate(case)) for case in cases]
        best = max(zip(new, rare, cases, strict=True), key=lambda one: one[:2])[2]
        left -= {*enumerate(best)}
        used.update(enumerate(best))
        quick.append(best)
    return slow_but(quick, cases)


def as_tuple(case):
    return case if isinstance(case, tuple) else (case,)


def in_turn(many, few, rounds=1, slow=0):
    """Every one of `many` with as many of `few` as there are rounds, in turn; the last `slow` rounds are slow tests."""
    return [
        pytest.param(each, few[(i + n) % len(few)], marks=[pytest.mark.slow] * (n >= rounds - slow))
        for n in range(rounds)
        for i, each in enumerate(many)
    ]
