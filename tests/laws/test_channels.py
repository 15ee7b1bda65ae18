"""Law 6: an operator-parallel module equals the single-device one in output and every gradient.

Hypothesis generates the convolutions here; four processes, started once, check all of them on 2, 3 and 4 processes.
The reference is the plain module.
"""

import pytest

from laws import operator_cases as cases
from laws.drawing import drawn
from runtime.processes import launch

NUMBERS = {
    "single": (cases.singles(2), 30),
    "signals and volumes": (cases.singles(1) | cases.singles(3), 20),
    "grouped": (cases.grouped(2) | cases.grouped(1), 16),
    "pairs": (cases.pairs(2), 36),
    "pairs of signals and volumes": (cases.pairs(1) | cases.pairs(3), 20),
    "classifiers": (cases.classifiers(), 10),
}


@pytest.mark.parametrize(("share", "least", "cut"), [pytest.param(1, 120, 80, marks=pytest.mark.slow), (6, 20, 10)])
def test_channels_equal_one_device(share, least, cut):
    every = [case for strategy, number in NUMBERS.values() for case in drawn(strategy, number // share, cases)]
    results = launch(4, "laws.operator_cases:law", every)
    assert len(every) >= least
    assert [sum(number in each for each in results) for number in range(len(every))] == [case.size for case in every]
    assert sum(any(each.get(number) for each in results) for number in range(len(every))) >= cut
