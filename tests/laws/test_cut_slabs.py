"""Law 6: a module cut over channels and over rows at once equals the single-device one in output and every gradient.

Hypothesis generates the layers here; four processes, started once, check them all. The reference is the plain module.
"""

import pytest

from laws import cut_slab_cases as cases
from laws.drawing import drawn
from runtime.processes import launch

NUMBERS = {
    "convolutions": (cases.convolutions(), 8),
    "pairs": (cases.pairs(), 10),
    "classifiers": (cases.classifiers(), 6),
}


@pytest.mark.parametrize(("share", "least", "cut"), [pytest.param(1, 20, 10, marks=pytest.mark.slow), (4, 5, 1)])
def test_channels_of_slabs_equal_one_device(share, least, cut):
    every = [case for strategy, number in NUMBERS.values() for case in drawn(strategy, number // share, cases)]
    results = launch(4, "laws.cut_slab_cases:law", every)
    assert len(every) >= least
    assert all(len(told) == len(every) for told in results)
    assert sum(map(bool, results[0])) >= cut
