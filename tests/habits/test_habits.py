"""Every habit, alone and with another one, under every method: plain PyTorch's numbers or a refusal, nothing else."""

import random
from itertools import combinations

import pytest

from habits.judge import METHODS, verdict
from habits.networks import HABITS

ALONE = [(habit, method) for index, habit in enumerate(HABITS) for method in [[*METHODS][index % len(METHODS)]]]
PAIRS = sorted(combinations(HABITS, 2))
random.Random(0).shuffle(PAIRS)


@pytest.mark.parametrize(("habit", "method"), ALONE)
def test_a_habit_is_plain_pytorch_or_refused(habit, method):
    found = verdict(frozenset([habit]), method)
    assert found.kind in ("equal", "refused"), found.said
