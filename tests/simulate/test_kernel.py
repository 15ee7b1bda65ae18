"""The compiled kernel is the same functions as the one in Python, and gives the same times."""

import importlib.util
import pickle
import random

import numpy as np
import pytest

from pairwise import slow_where
from simulate.test_oracle import random_network, random_plan
from stretto.simulate import engine, simulate

NUMBA = importlib.util.find_spec("numba") is not None


@pytest.mark.skipif(not NUMBA, reason="numba, an optional extra, is not installed: there is nothing to compare")
@pytest.mark.parametrize("seed", slow_where(lambda seed: seed > 5, range(40)))
def test_compiled_and_not(monkeypatch, seed):
    found = []
    for pays in (0, 10**9):
        monkeypatch.setattr(engine, "MIN_ACTIONS", pays)
        generator = random.Random(seed)
        schedule, rules = random_plan(generator)
        network = random_network(generator, schedule.num_workers)
        chosen = {"sends": generator.choice(["buffered", "rendezvous"]), "overlap": generator.random() < 0.5}
        timeline = simulate(
            schedule, rules, 4, lambda a: 0.1 * len(str(a)), network=network, sizes=lambda edge: 0.3, **chosen
        )
        found.append(timeline.outcome)
    for name in ("starts", "ranks", "sent", "linked", "arrivals"):
        assert np.array_equal(getattr(found[0], name), getattr(found[1], name)), name


def test_without_numba_the_same_functions_run_as_they_stand(monkeypatch):
    monkeypatch.setattr(engine, "compiled", lambda: None)
    monkeypatch.setattr(engine, "MIN_ACTIONS", 0)
    schedule, rules = random_plan(random.Random(1))
    assert simulate(schedule, rules, 3).makespan > 0


@pytest.mark.slow  # compiles twice
@pytest.mark.skipif(not NUMBA, reason="numba, an optional extra, is not installed: it keeps nothing")
def test_what_an_older_kernel_left_is_compiled_anew(monkeypatch, tmp_path):
    import numba

    monkeypatch.setattr(engine, "MIN_ACTIONS", 0)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    schedule, rules = random_plan(random.Random(1))

    def simulated():
        engine.compiled.cache_clear()
        return simulate(schedule, rules, 4, lambda a: 0.1 * len(str(a))).outcome

    try:
        first = simulated()
        (index,) = tmp_path.rglob("kernel.run-*.nbi")
        version = pickle.dumps(pickle.loads(index.read_bytes()))
        index.write_bytes(version + b"(S'stamp'\ncstretto.simulate.kernel\nProgramOfOld\nt.")
        assert np.array_equal(simulated().starts, first.starts)
        assert b"ProgramOfOld" not in index.read_bytes()
    finally:
        engine.compiled.cache_clear()
