"""Law 6: a space-parallel module equals the single-device one in output and every gradient.

Hypothesis generates the cases here; four processes, started once, check all of them. The reference is the plain module.
"""

import pytest

from laws import spatial_cases as cases
from laws.drawing import drawn
from runtime.processes import launch

NUMBERS = {
    "convolutions": (cases.convolutions(), 50),
    "centred convolutions": (cases.centred() | cases.centred(1), 40),
    "signals and volumes": (cases.convolutions(1) | cases.convolutions(3), 25),
    "transposed": (cases.transposed() | cases.transposed(1) | cases.transposed(3), 25),
    "pools": (cases.max_pools() | cases.average_pools() | cases.max_pools(1) | cases.average_pools(1), 45),
    "volume pools": (cases.max_pools(3) | cases.average_pools(3), 14),
    "adaptive pools": (cases.adaptive_pools() | cases.adaptive_pools(1), 24),
    "norms": (cases.norms(), 25),
    "resampling": (cases.resamplings() | cases.paddings() | cases.shuffles(), 40),
}


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_slabs_equal_one_device(share):
    every = [case for strategy, number in NUMBERS.values() for case in drawn(strategy, number // share, cases)]
    results = launch(4, "laws.spatial_cases:law", every, timeout=300)
    checked = [[each[number] for each in results if number in each] for number in range(len(every))]
    assert [len(told) for told in checked] == [case.grid[0] * case.grid[1] for case in every]
    assert sum(any(compared for compared, _ in told) for told in checked) >= 240 // share
    assert sum(all(added for _, added in told) for told in checked) >= 20 // share
