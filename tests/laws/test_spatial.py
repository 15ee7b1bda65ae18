"""Law 6: a space-parallel module equals the single-device one in output and every gradient.

Hypothesis generates the cases here; four processes, started once, check all of them. The reference is the plain module.
"""

from hypothesis import assume, given, settings

from laws import spatial_cases as cases
from runtime.processes import launch

NUMBERS = {
    "convolutions": (cases.convolutions(), 120),
    "signals and volumes": (cases.convolutions(1) | cases.convolutions(3), 50),
    "transposed": (cases.transposed() | cases.transposed(1) | cases.transposed(3), 50),
    "pools": (cases.max_pools() | cases.average_pools() | cases.max_pools(1) | cases.average_pools(1), 100),
    "volume pools": (cases.max_pools(3) | cases.average_pools(3), 20),
    "adaptive pools": (cases.adaptive_pools() | cases.adaptive_pools(1), 50),
    "norms": (cases.norms(), 40),
    "resampling": (cases.resamplings() | cases.paddings() | cases.shuffles(), 100),
}


def drawn(strategy, number):
    """As many cases as asked, of those that plain torch can do."""
    found = []

    @settings(max_examples=number)
    @given(strategy)
    def draw(case):
        assume(cases.possible(case))
        found.append(case)

    draw()
    return found


def test_slabs_equal_one_device():
    every = [case for strategy, number in NUMBERS.values() for case in drawn(strategy, number)]
    compared = launch(4, "laws.spatial_cases:law", every)
    assert compared[1] >= 400
    assert min(compared) >= 300
