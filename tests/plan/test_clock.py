"""What plans know of methods in closed form against the schedules that the methods lay out."""

import pytest

from stretto.mesh import Mesh
from stretto.methods import method
from stretto.plan import Candidate
from stretto.plan.clock import CLOCKS
from stretto.simulate import simulate

SHAPES = [(2, 1), (2, 4), (3, 3), (3, 6), (4, 2), (4, 8)]


def candidate(name, pipeline, microbatches):
    cut = CLOCKS[name].cut
    if name == "pipedream-2bw":
        microbatches = max(microbatches, pipeline)
    if name == "interleaved" and microbatches % max(1, microbatches // pipeline):
        microbatches = pipeline
    return Candidate(pipeline, Mesh(), 64, name, microbatches if cut else 1)


@pytest.mark.parametrize(("pipeline", "microbatches"), SHAPES)
@pytest.mark.parametrize("name", [name for name in CLOCKS if name != "backprop"])
def test_versions_delays_and_micro_batches_held(name, pipeline, microbatches):
    c = candidate(name, pipeline, microbatches)
    chosen = method(str(c))
    schedule, rules = chosen.plan(c.stages, c.pipeline)
    assert chosen.synchronous == c.clock.drains
    assert schedule.per_turn == c.microbatches
    assert list(chosen.versions(schedule)) == [c.clock.versions(c.at(s)) for s in range(c.stages)]
    delays = chosen.delays(schedule).steady
    assert all(real <= c.clock.delay(c.at(s)) for s, real in enumerate(delays))
    if name != "paci":
        assert list(delays) == [c.clock.delay(c.at(s)) for s in range(c.stages)]
    timeline = simulate(schedule, rules, schedule.drain + 2)
    held = [c.clock.held(c.at(s)) for s in range(c.stages)]
    if c.clock.chunks > 1:  # a worker's chunks share what it holds
        by_worker = [sum(held[w :: c.pipeline]) for w in range(c.pipeline)]
        assert all(real <= told for real, told in zip(timeline.peak_activations, by_worker, strict=True))
    elif name == "zb-h1":
        assert all(real <= told for real, told in zip(timeline.peak_graphs, held, strict=True))
        assert max(timeline.peak_graphs) == max(held)
    else:
        assert list(timeline.peak_graphs) == held


@pytest.mark.parametrize("name", [name for name in CLOCKS if CLOCKS[name].drains and name != "backprop"])
def test_stages_that_recompute(name):
    c = candidate(name, 3, 6)._replace(recompute=True)
    schedule, _ = method(str(c)).plan(c.stages, c.pipeline)
    real = {action.stage for body in schedule.body for action in body if action.kind == "C"}
    assert real <= {s for s in range(c.stages) if c.recomputes(s)}
    assert len(real) >= c.stages - 1
