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


CENTRED = {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "padding": 1}
WITH_HALOS_LATER = [
    cases.Case("Conv2d", CENTRED, (1, 2, 12, 12), (2, 2)),
    cases.Case("Conv2d", CENTRED, (2, 2, 9, 16), (1, 4)),
    cases.Case("Conv1d", CENTRED, (1, 2, 12), (1, 2)),
    # found by new seeds: slabs that are those of the padded image as they are
    cases.Case("Conv1d", CENTRED | {"padding_mode": "replicate"}, (1, 2, 11), (1, 4)),
    # and windows with gaps between them, of which the first sees padding only
    cases.Case(
        "Conv2d",
        CENTRED | {"kernel_size": (3, 1), "stride": 2, "dilation": (2, 1), "padding": (2, 3)},
        (2, 2, 11, 6),
        (2, 1),
    ),
]


@pytest.mark.parametrize(
    ("share", "known", "compared", "added"),
    [pytest.param(1, [], 220, 6, marks=pytest.mark.slow), (12, WITH_HALOS_LATER, 15, 4)],
    ids=["many", "few"],
)
def test_slabs_equal_one_device(share, known, compared, added):
    every = [case for strategy, number in NUMBERS.values() for case in drawn(strategy, number // share, cases)] + known
    results = launch(4, "laws.spatial_cases:law", every, timeout=300)
    checked = [[each[number] for each in results if number in each] for number in range(len(every))]
    assert [len(told) for told in checked] == [case.grid[0] * case.grid[1] for case in every]
    assert sum(any(equal for equal, _ in told) for told in checked) >= compared
    assert sum(all(later for _, later in told) for told in checked) >= added
