"""Random networks as people write them: one to four habits at once, a method, stages, and a way to train.

What Stretto comes to is compared with plain loops (tests/habits/judge.py), or is refused; nothing else passes.
"""

import random

from attack.protocol import Outcome
from habits.judge import METHODS, WAYS, judged, verdict
from habits.loaders import LOADERS
from habits.networks import HABITS

SHARE = 60
IMPOSSIBLE = {"spectral_norm", "an old weight_norm"}  # torch cannot have both, either


def attack(seed):
    """Trains network `seed` by Stretto and by a plain loop."""
    draw = random.Random(f"habits {seed}")
    while True:
        habits = frozenset(draw.sample(HABITS, draw.choice([1, 2, 2, 2, 3, 4])))
        method = draw.choice([*METHODS])
        if not habits >= IMPOSSIBLE and judged(habits, method):
            break
    stages, way, load = draw.choice([2, 2, 3]), draw.choice(WAYS), draw.choice(LOADERS)
    found = verdict(habits, method, stages, way, load)
    tried = f"{', '.join(sorted(habits))}; {method}, {stages} stages, {way}" + f" ({load})" * (way == "fit")
    failure = None if found.kind in ("equal", "refused") else found.said
    return Outcome(tried, failure, f"{found.kind}, {way}" if found.kind == "equal" else found.kind)
