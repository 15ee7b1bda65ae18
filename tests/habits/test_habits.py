"""Every habit, alone and with another one, under every method: plain PyTorch's numbers or a refusal, nothing else."""

import random
from itertools import combinations, product

import pytest

from habits.judge import METHODS, WAYS, judged, verdict
from habits.loaders import LOADERS
from habits.networks import HABITS
from habits.page import EVERY, answer, written
from pairwise import slow_but, slow_where

IMPOSSIBLE = {frozenset(("spectral_norm", "an old weight_norm"))}  # torch cannot, either
PAIRS = [pair for pair in combinations(HABITS, 2) if frozenset(pair) not in IMPOSSIBLE]
random.Random(0).shuffle(PAIRS)
QUICK, SLOW = 40, 600
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),  # first in a stage that ends there
]
EQUAL = {  # what a plain loop's numbers are expected of under every method
    "a gradient reversed in a block", "another branch in training in a block", "a counter in a block", "checkpointed",
    "a block called twice", "blocks in reverse", "a skip over all blocks", "an input used at the end", "a temperature",
    "batch norms", "a frozen batch norm", "weight_norm", "spectral_norm", "an old weight_norm", "a buffer that counts",
    "a buffer that is replaced", "a buffer of the root that counts", "frozen blocks", "tied ends",
    "blocks that share weights", "extra state", "a hook of a block", "a pre-hook of a block",
    "a backward hook of a block", "a mask on a weight", "a tuple", "two inputs", "named inputs", "a mean of its own",
    "a sum and a count", "smoothed labels", "detach between blocks", "a hidden state passed along", "dropout",
    "a recurrent layer", "a state carried from batch to batch", "a mask made at the first call", "a dict",
    "a dict in a tuple",
}  # fmt: skip
REFUSED = {"weight_norm": "pb", "spectral_norm": "pb", "an old weight_norm": "pb"}  # computed in the forward


def method_of(number):
    """Each method in its turn."""
    return [*METHODS][number % len(METHODS)]


def fine(habits, method, **how):
    """The case is equal or refused; which of them. What no plain loop can judge is skipped by name."""
    if not judged(frozenset(habits), method):
        return "not judged"
    found = verdict(frozenset(habits), method, **how)
    assert found.kind in ("equal", "refused"), f"{habits}, {method}, {how}: {found.said}"
    return found.kind


@pytest.mark.parametrize(("way", "method"), [*product(WAYS, METHODS)])
def test_a_network_without_habits_is_plain_pytorch(way, method):
    assert fine((), method, way=way) == "equal"


@pytest.mark.parametrize(("load", "method"), slow_but([*zip(LOADERS, METHODS, strict=True)], product(LOADERS, METHODS)))
def test_a_loader_gives_fit_what_it_gives_a_plain_loop(load, method):
    assert fine((), method, way="fit", load=load) == "equal"


@pytest.mark.parametrize(
    ("habit", "method"),
    [
        pytest.param(habit, method, marks=[pytest.mark.slow] * (method != method_of(index)))
        for index, habit in enumerate(HABITS)
        for method in METHODS
    ],
)
def test_a_habit_is_plain_pytorch_or_refused(habit, method):
    found = fine([habit], method)
    assert found != "refused" or habit not in EQUAL or method == REFUSED.get(habit)


@pytest.mark.parametrize("number", slow_where(lambda number: number >= QUICK, range(SLOW)))
def test_two_habits_are_plain_pytorch_or_refused(number):
    """In each way to train in its turn; processes in `make attack`."""
    fine(PAIRS[number], method_of(number), way=WAYS[number // len(METHODS) % 3])


def test_the_page_has_every_habit():
    assert [*written()] == EVERY
    assert {*EVERY} == {*HABITS, *LOADERS}


@pytest.mark.docs
@pytest.mark.parametrize("habit", EVERY)
def test_the_page_says_what_becomes_of_a_habit(habit):
    assert written()[habit] == answer(habit)
