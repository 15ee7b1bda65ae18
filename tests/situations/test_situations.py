"""Situations from public reports, the half that was looked at: plain PyTorch's numbers, or a refusal."""

import logging
import re

import pytest

import situations.situations  # noqa: F401 (fills the table)
from situations.kit import METHODS, SITUATIONS, answer
from situations.run import SEEN

pytestmark = pytest.mark.filterwarnings("ignore")  # what people's scripts warn of
EQUAL = {0, 1, 4, 6, 7, 18, 24, 25, 26, 28, 31, 38, 41, 49}
REFUSED = {  # patterns
    2: "cannot be exported at .*int.self.pointer",
    5: r"the loss reads Net.blocks.1.aux_loss, which forwards assign",
    8: "keeps in hidden would be lost",
    16: "enters torch.autocast between its blocks",
    17: "changes its input in place",
    19: "the loss of stage 1 has a gradient for a tensor",
    21: "LBFGS evaluates the loss several times a step",
    23: "the optimizer of stage 0 also steps a parameter",
    33: "the loss got output .* and target .*: let both have one shape",
    44: "takes only as many rows of x as the example, 12",
}
CUT_ALONE = {30: "the loss is not a mean over examples"}  # refused where minibatches are cut
SLOW = {1, 2, 4, 8, 16, 38, 44}  # exported, or inside Lightning


def is_quick(number, method):
    """One method each, in turn."""
    methods = SITUATIONS[number].methods
    return number not in SLOW and method == methods[number % len(methods)]


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_the_half_that_was_looked_at_is_told_apart():
    assert {*EQUAL, *REFUSED, *CUT_ALONE} == {*SEEN}
    assert [*SITUATIONS] == [*range(50)]


@pytest.mark.parametrize(
    ("number", "method"),
    [
        pytest.param(number, method, marks=[pytest.mark.slow] * (not is_quick(number, method)))
        for number in SEEN
        for method in SITUATIONS[number].methods
    ],
)
def test_a_situation_is_plain_pytorch_or_refused(number, method):
    said = answer(number, method)
    pattern = REFUSED.get(number) or (CUT_ALONE.get(number) if method in METHODS[1:3] else None)
    if pattern is not None:
        assert re.match(f"refused: .*{pattern}", said, re.DOTALL), said
    else:
        assert said == "equal"
