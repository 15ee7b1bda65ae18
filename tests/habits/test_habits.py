"""Every habit, alone and with another one, under every method: plain PyTorch's numbers or a refusal, nothing else."""

import random
from itertools import combinations

import pytest

from habits.judge import METHODS, verdict
from habits.networks import HABITS
from habits.page import answer, written
from pairwise import slow_where

IMPOSSIBLE = {frozenset(("spectral_norm", "an old weight_norm"))}  # torch cannot, either
PAIRS = [pair for pair in combinations(HABITS, 2) if frozenset(pair) not in IMPOSSIBLE]
random.Random(0).shuffle(PAIRS)
QUICK, SLOW = 40, 600
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
EQUAL = {  # what a plain loop's numbers are expected of under every method
    "a gradient reversed in a block", "another branch in training in a block", "a counter in a block", "checkpointed",
    "a block called twice", "blocks in reverse", "a skip over all blocks", "an input used at the end", "a temperature",
    "batch norms", "a frozen batch norm", "weight_norm", "spectral_norm", "an old weight_norm", "a buffer that counts",
    "a buffer that is replaced", "a buffer of the root that counts", "frozen blocks", "tied ends",
    "blocks that share weights", "extra state", "a hook of a block", "a pre-hook of a block",
    "a backward hook of a block", "a mask on a weight", "a tuple", "two inputs", "named inputs", "a mean of its own",
    "a sum and a count", "smoothed labels", "detach between blocks",
}  # fmt: skip


def method_of(number):
    """Each method in its turn."""
    return [*METHODS][number % len(METHODS)]


@pytest.mark.parametrize("method", METHODS)
def test_a_network_without_habits_is_plain_pytorch(method):
    assert verdict(frozenset(), method).kind == "equal"


@pytest.mark.parametrize(
    ("habit", "method"),
    [
        pytest.param(habit, method, marks=[pytest.mark.slow] * (method != method_of(index)))
        for index, habit in enumerate(HABITS)
        for method in METHODS
    ],
)
def test_a_habit_is_plain_pytorch_or_refused(habit, method):
    found = verdict(frozenset([habit]), method)
    assert found.kind in ("equal", "refused"), found.said
    assert found.kind == "equal" or habit not in EQUAL, found.said


@pytest.mark.parametrize("number", slow_where(lambda number: number >= QUICK, range(SLOW)))
def test_two_habits_are_plain_pytorch_or_refused(number):
    found = verdict(frozenset(PAIRS[number]), method_of(number))
    assert found.kind in ("equal", "refused"), f"{PAIRS[number]}, {method_of(number)}: {found.said}"


def test_the_page_has_every_habit():
    assert [name for name in written() if name in HABITS] == [*HABITS]


@pytest.mark.docs
@pytest.mark.parametrize("habit", HABITS)
def test_the_page_says_what_becomes_of_a_habit(habit):
    assert written()[habit] == answer(habit)
