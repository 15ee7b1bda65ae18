"""A small share of every attack; `make attack BUDGET=minutes` has the rest."""

import pytest

from attack.protocol import find, names


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_attack(name):
    attack = find(name)
    cases = {seed: attack.case(seed) for seed in range(attack.share)}
    failures = [f"{attack.again(seed)}\n{each.tried}\n{each.failure}" for seed, each in cases.items() if each.failure]
    assert not failures, "\n\n".join(failures)
