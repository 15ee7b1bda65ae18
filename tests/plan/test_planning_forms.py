"""What methods say of themselves in closed form against the schedules that they lay out."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pairwise import in_turn, slow_where
from stretto.mesh import Mesh
from stretto.methods import method
from stretto.plan import Candidate
from stretto.plan.closed_forms import StageTable, adds_fill, busiest, fill_and_load, wait_form, wait_terms
from stretto.plan.planned_methods import catalogue, planned
from stretto.simulate import period, simulate

MANY = [name for name in catalogue() if planned(name).planning.any_per_worker]
SHAPES = [(2, 1), (2, 4), (3, 3), (3, 6), (4, 2), (4, 8)]


def candidate(name, pipeline, microbatches):
    planning = planned(name).planning
    while not planning.allows(microbatches, pipeline):
        microbatches += 1
    losses = max(2, pipeline - 1) if planning.losses else 1
    return Candidate(pipeline, Mesh(), 64, name, microbatches if planning.cut else 1, losses=losses)


@pytest.mark.parametrize(
    ("name", "shape"), in_turn([name for name in catalogue() if planned(name).suits(2)], SHAPES, rounds=6, slow=4)
)
def test_versions_delays_and_micro_batches_held(name, shape):
    pipeline, microbatches = shape
    c = candidate(name, pipeline, microbatches)
    chosen = method(str(c))
    schedule, rules = chosen.plan(c.stages, c.pipeline)
    assert chosen.synchronous == c.planned.drains
    assert [c.worker_of(s) for s in range(c.stages)] == [schedule.worker_of[s] for s in range(c.stages)]
    assert rules.reach.heads[:-1] == tuple(sorted(c.gradients.heads))
    assert [c.receives_gradient(s) for s in range(c.stages)] == [bool(rules.reach.arriving(s)) for s in range(c.stages)]
    mostly_split = [s in rules.split and not any(stage == s for stage, _ in rules.whole) for s in range(c.stages)]
    assert [c.num_backward_actions(s) - 1 for s in range(c.stages)] == mostly_split
    assert schedule.per_turn == c.microbatches
    assert list(chosen.versions(schedule)) == [c.planned.versions(c.stage_at(s)) for s in range(c.stages)]
    assert list(chosen.delays(schedule).mean) == [c.planning.delay(c.stage_at(s)) for s in range(c.stages)]
    timeline = simulate(schedule, rules, schedule.drain + 2)
    held = [c.planning.held(c.stage_at(s)) for s in range(c.stages)]
    assert c.stages == c.pipeline * c.planning.stages_per_worker
    if c.planning.stages_per_worker > 1:  # a worker's chunks share what it holds
        by_worker = [sum(held[w :: c.pipeline]) for w in range(c.pipeline)]
        assert all(real <= told for real, told in zip(timeline.peak_activations, by_worker, strict=True))
    elif name in ("zb-h1", "zb-h2"):
        assert all(real <= told for real, told in zip(timeline.peak_graphs, held, strict=True))
        assert max(timeline.peak_graphs) == max(held)
    else:
        assert list(timeline.peak_graphs) == held


@pytest.mark.parametrize("per_worker", [3, 4])
@pytest.mark.parametrize("name", MANY)
def test_more_stages_a_worker(name, per_worker):
    c = candidate(name, 4, 8)._replace(per_worker=per_worker)
    assert c.stages == 4 * per_worker
    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    assert [c.worker_of(s) for s in range(c.stages)] == [schedule.worker_of[s] for s in range(c.stages)]
    held = [c.planning.held(c.stage_at(s)) for s in range(c.stages)]
    by_worker = [sum(held[w :: c.pipeline]) for w in range(c.pipeline)]
    real = simulate(schedule, rules, schedule.drain + 2).peak_activations
    assert all(found <= told for found, told in zip(real, by_worker, strict=True))
    assert name != "interleaved" or list(real) == by_worker


@pytest.mark.parametrize("ahead", [1, 3, 20])
@pytest.mark.parametrize("name", [name for name in catalogue() if planned(name).planning.ahead])
def test_micro_batches_held_by_workers_that_run_ahead(name, ahead):
    c = candidate(name, 3, 6)._replace(ahead=ahead)
    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    held = [c.planning.held(c.stage_at(s)) for s in range(c.stages)]
    by_worker = [sum(held[w :: c.pipeline]) for w in range(c.pipeline)]
    assert list(simulate(schedule, rules, 2).peak_activations) == by_worker


@pytest.mark.parametrize("name", [name for name in catalogue() if planned(name).drains and planned(name).suits(2)])
def test_stages_that_recompute(name):
    c = candidate(name, 3, 6)._replace(recompute="stage")
    schedule, _ = method(str(c)).plan(c.stages, c.pipeline)
    real = {action.stage for body in schedule.body for action in body if action.kind == "C"}
    assert real <= {s for s in range(c.stages) if c.recomputes(s)}
    assert len(real) >= c.stages - 1


def stage_of(forward, inputs, weights, message=0.0, end=0.0):
    """A stage in numbers."""
    none = dict.fromkeys(StageTable._fields, 0) | {"passes": {}}
    times = {"forward": forward, "backward": inputs + weights, "deferrable": weights, "transit": message, "update": end}
    return StageTable(**none | times)


def durations(stages):
    """The same for the simulator: U takes what ends a turn, B both halves."""

    def duration(action):
        x = stages[action.stage]
        times = {"F": x.forward, "B": x.backward, "I": x.backward - x.deferrable, "W": x.deferrable, "U": x.update}
        return (times | {"L": x.learn})[action.kind]

    return duration


@pytest.mark.parametrize("seed", slow_where(bool, range(4)))
@pytest.mark.parametrize(
    ("name", "per_worker"),
    [(name, 0) for name in ("1f1b", "gpipe", "zb-h1", "zb-v", "interleaved", "looped-bfs")] + [(m, 3) for m in MANY],
)
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_equal_stages_take_what_the_closed_form_says(name, per_worker, pipeline, microbatches, seed):
    dice = random.Random(seed)
    c = candidate(name, pipeline, microbatches)._replace(per_worker=per_worker)
    forward, inputs, weights = (dice.randint(1, 16) for _ in range(3))
    x = stage_of(forward, inputs, weights, end=0 if planned(name).planning.split else dice.randint(0, 3))
    priced = [fill_and_load(c, s, x) for s in range(c.stages)]
    told = max(load for _, load in priced) + (sum(fill for fill, _ in priced) if adds_fill(c) else 0)
    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    found = simulate(schedule, rules, 1, durations([x] * c.stages)).makespan
    assert told == found


@pytest.mark.parametrize("last", [0.6, 1.3])
@pytest.mark.parametrize(
    ("name", "per_worker"), [("interleaved", 2), ("interleaved", 3), ("looped-bfs", 3), ("zb-v", 0)]
)
def test_one_stage_that_differs_counts_as_a_part_of_its_worker(name, per_worker, last):
    """As the stage behind which logits are: workers with several stages wait for it only while it runs."""
    c = candidate(name, 4, 16)._replace(per_worker=per_worker)
    lengths = [1.0] * (c.stages - 1) + [last]
    stages = [stage_of(x, x, x) for x in lengths]
    loads = [float(fill_and_load(c, s, x)[1]) for s, x in enumerate(stages)]
    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    found = simulate(schedule, rules, 1, durations(stages)).makespan
    assert busiest(c, loads)[1] == pytest.approx(found, rel=0.03)
    assert max(loads) > 1.04 * found or last < 1


@pytest.mark.parametrize("seed", slow_where(bool, range(4)))
@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (3, 6), (4, 9)])
def test_zb_h2_is_priced_from_step_to_step(pipeline, microbatches, seed):
    """The first worker begins the next step before the last one has ended this one."""
    dice = random.Random(seed)
    c = candidate("zb-h2", pipeline, microbatches)
    x = stage_of(*(dice.randint(1, 16) for _ in range(3)))
    told = max(fill_and_load(c, s, x)[1] for s in range(pipeline)) + sum(
        fill_and_load(c, s, x)[0] for s in range(pipeline)
    )
    assert told == period(*method(str(c)).plan(pipeline, pipeline), durations([x] * pipeline))
    message = stage_of(12.0, 12.0, 12.0, message=1.0)
    stages = [message._replace(transit=0.0) if s == pipeline - 1 else message for s in range(pipeline)]
    priced = [fill_and_load(c, s, stage) for s, stage in enumerate(stages)]
    told = max(load for _, load in priced) + sum(fill for fill, _ in priced)
    assert told == period(*method(str(c)).plan(pipeline, pipeline), durations(stages), latency=1.0)


@pytest.mark.parametrize("seed", slow_where(bool, range(6)))
@pytest.mark.parametrize(("pipeline", "microbatches"), [(1, 2), (2, 4), (3, 6), (4, 9)])
@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_dualpipe_v_is_priced_to_a_forward_and_a_transit(pipeline, microbatches, latency, seed):
    dice = random.Random(seed)
    c = candidate("dualpipe-v", pipeline, microbatches)
    x = stage_of(*(float(dice.randint(8, 16)) for _ in range(3)), message=latency)
    stages = [x._replace(transit=0.0) if s == c.stages - 1 or c.link_index(s) is None else x for s in range(c.stages)]
    told = max(fill_and_load(c, s, stage)[1] for s, stage in enumerate(stages))
    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    found = simulate(schedule, rules, 1, durations(stages), latency=latency).makespan
    assert abs(told - found) <= x.forward + (pipeline - 1) * latency
    if latency == 0:
        assert told >= found


@pytest.mark.parametrize("name", ["gpipe", "looped-bfs", "zb-v"])
def test_short_messages_between_equal_stages(name):
    c = candidate(name, 3, 9)
    x = stage_of(4.0, 4.0, 4.0, message=1.0)
    stages = [x._replace(transit=0.0) if s == c.stages - 1 or c.link_index(s) is None else x for s in range(c.stages)]
    priced = [fill_and_load(c, s, stage) for s, stage in enumerate(stages)]
    told = max(load for _, load in priced) + (sum(fill for fill, _ in priced) if adds_fill(c) else 0)
    schedule, rules = method(str(c)).plan(c.stages, c.pipeline)
    assert told == simulate(schedule, rules, 1, durations(stages), latency=1.0).makespan


@pytest.mark.parametrize("seed", slow_where(lambda seed: seed > 2, range(8)))
@pytest.mark.parametrize("name", ["chunked", "overlapping(delay=0)"])
def test_stages_that_wait_take_what_the_schedule_takes_whatever_they_cost(name, seed):
    dice = random.Random(seed)
    c = candidate(name, 5, 1)._replace(losses=dice.choice([2, 3, 4]) if name == "chunked" else 1)
    latency = dice.choice([0.0, 0.5, 2.0])
    stages = [
        stage_of(
            *(float(dice.randint(1, 16)) for _ in range(3)), message=latency * (s < 4), end=float(dice.randint(0, 9))
        )
        for s in range(5)
    ]
    schedule, rules = method(str(c)).plan(5, 5)
    told = wait_form(c).longest([wait_terms(c, s, x) for s, x in enumerate(stages)])
    assert told == period(schedule, rules, durations(stages), latency=latency)


@given(data=st.data(), pipeline=st.integers(2, 6), delay=st.integers(1, 3), latency=st.sampled_from([0, 1, 3, 8]))
def test_predicted_gradients_take_what_the_schedule_takes_whatever_stages_cost(data, pipeline, delay, latency):
    """Messages of any latency, and of L what is learned from earlier turns."""
    c = candidate(f"synthetic-gradients(delay={delay})", pipeline, 1)

    def stage(s):
        forward, backward, update, learn = (data.draw(st.integers(0, 9)) for _ in range(4))
        x = stage_of(forward, backward, 0, message=float(latency * (s < pipeline - 1)), end=update)
        return x._replace(learn=learn * (s < pipeline - 1))

    stages = [stage(s) for s in range(pipeline)]
    told = wait_form(c).longest([wait_terms(c, s, x) for s, x in enumerate(stages)])
    schedule, rules = method(str(c)).plan(pipeline, pipeline)
    assert told == pytest.approx(period(schedule, rules, durations(stages), latency=float(latency)), rel=1e-12)


def test_heads_that_detach_nothing_are_planned_where_they_stand():
    known = planned("1f1b(head_at=1, head=linear)")
    assert known.has_heads
    assert not known.suits(2)
    c = Candidate(4, Mesh(), 64, "1f1b(head_at=1, head=linear)", 8)
    assert c.gradients.heads == {1}
    assert all(c.receives_gradient(stage) for stage in range(3))
    assert str(method(str(c))) == str(c)
    assert not planned("1f1b").has_heads
