"""Wrong calls, some of each kind in each run of the quick tests; `make attack` has thousands."""

import contextlib
import io
import warnings

import pytest

from attack import calls, training_calls

IMPORT_MUCH = ("lightning", "transformers")
KINDS = {
    f"{module.__name__.rpartition('.')[2]} {kind.__name__}": (module.DRAWS, kind)
    for module in (calls, training_calls)
    for kind in module.DRAWS.kinds
}
QUICK = [name for name in KINDS if name.partition(" ")[2] not in IMPORT_MUCH]


@pytest.mark.parametrize("name", QUICK)
def test_a_wrong_call_is_refused_or_works(name):
    draws, kind = KINDS[name]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        tried = [draws.attack(seed, kind) for seed in range(4)]
    assert [each for each in tried if each.failure] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("training_calls")])
def test_calls_work_before_they_are_spoiled(name):
    """So that it is what was replaced that is refused."""
    draws, kind = KINDS[name]
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        for seed in range(3):
            draws.unspoiled(seed, kind)
