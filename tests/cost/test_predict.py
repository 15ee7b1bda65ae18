"""Times of stages from costs and clusters, worked out by hand; the lecture's formulas for communication."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from stretto import UsageError
from stretto.collectives import formula
from stretto.cost import Cluster, Device, Group, Link, Measured, ModelCosts, Rate, layer_costs, stage_times
from stretto.cost.layer_table import Affine
from stretto.cost.stage_prediction import Machine, gradient_seconds, times_by_part
from stretto.methods import method
from stretto.optimizers import optimizer_of
from stretto.parallel.price import LinearLayer, ProcessGrid, best_rows, price
from stretto.simulate import period, simulate

PEAK, BANDWIDTH, ITEM = 1e9, 1e8, 4
LINK = Link(latency=1e-3, bandwidth=1e6)


def cluster(workers=4, nodes=1, **device):
    made = Device(memory=1e9, memory_bandwidth=BANDWIDTH, peak={"float32": PEAK}, **device)
    group = Group(nodes=nodes, workers=workers, device="d", within="near", between="near")
    return Cluster(name="c", groups=(group,), devices={"d": made}, links={"near": LINK})


@cache
def wide(width=64, number=4):
    return layer_costs([nn.Linear(width, width, bias=False) for _ in range(number)], torch.randn(2, width))


def test_the_roofline_by_hand():
    few, many = (times_by_part(wide(), Machine(cluster().device(0), "float32"), b)[1].alone for b in (1, 1000))
    weights, row, flops = 64 * 64 * ITEM, 64 * ITEM, 2 * 64 * 64
    assert few.forward == pytest.approx((weights + 2 * row) / BANDWIDTH)  # one example: weights are read
    assert many.forward == pytest.approx(1000 * flops / PEAK)
    assert many.backward == pytest.approx(2 * many.forward)
    assert many.input_gradient == pytest.approx(many.forward) == many.weight_gradient
    assert few.update == pytest.approx(5 * weights / BANDWIDTH)  # momentum: three read, two written
    assert few.accumulate == pytest.approx(3 * weights / BANDWIDTH)


def test_rates_come_before_the_roofline_and_contention_with_neighbours():
    rates = {"linear": {"forward": Rate(per_call=1e-3, per_flop=1e-8, contention=1.5)},
             "sgd": {"update": Rate(per_call=2e-3)}}  # fmt: skip
    device = cluster(rates=rates).device(0)
    alone, crowded = (times_by_part(wide(), Machine(device, "float32", each), 10)[1].alone for each in (False, True))
    assert alone.forward == pytest.approx(1e-3 + 10 * 2 * 64 * 64 * 1e-8)
    assert crowded.forward == pytest.approx(1.5 * alone.forward)
    assert alone.update == pytest.approx(2e-3)
    assert crowded.backward == alone.backward  # no rate: the roofline
    spread = stage_times(wide(), [0, 2, 4], cluster(1, 2, rates=rates), 10)
    near = stage_times(wide(), [0, 2, 4], cluster(2, 1, rates=rates), 10)
    assert near[0].compute.forward == pytest.approx(1.5 * spread[0].compute.forward)


def test_measured_times_come_first():
    costs = wide()
    line = Affine(1e-2, 1e-4)
    rows = [type(row)(**{**vars(row), "measured": Measured(line, line, line, line, 3e-3)}) for row in costs.layers]
    measured = ModelCosts(tuple(rows), costs.dtype, start=1e-3)
    times = [parts.alone for parts in times_by_part(measured, Machine(cluster().device(0), "float32"), 20)]
    assert times[1][:5] == pytest.approx((1.2e-2, 1.2e-2, 1.2e-2, 1.2e-2, 3e-3))
    first, second = stage_times(measured, [0, 1, 4], cluster(), 20)
    assert first.compute[:5] == pytest.approx((1.2e-2, 1.3e-2, 0, 1.3e-2, 3e-3))
    assert second.compute[:5] == pytest.approx((3.6e-2, 3.7e-2, 3.7e-2, 3.7e-2, 9e-3))


def test_stages_by_hand():
    costs = wide()
    first, second = stage_times(costs, [0, 1, 4], cluster(), 1000)
    one = 1000 * 2 * 64 * 64 / PEAK
    assert first.compute[:4] == pytest.approx((one, one, 0, one))
    assert second.compute[:4] == pytest.approx((3 * one, 6 * one, 3 * one, 5 * one))
    assert (first.output, second.input) == (256_000, 256_000)
    assert second.gradients == 3 * 64 * 64 * ITEM
    above = costs.stages([0, 1, 4])[1]
    assert above.held.at(1000) == 4 * 256_000  # three inputs, and the output
    assert above.parameter_bytes == second.gradients
    states = [above.state_bytes(optimizer_of(name)) for name in ("sgd", "adam")]
    assert states == [second.gradients, 2 * second.gradients]


def test_replicas_share_examples_and_sum_gradients():
    costs = wide()
    (alone,), (shared,) = (stage_times(costs, [0, 4], cluster(), 1000, workers=[w]) for w in ([0], [0, 1, 2, 3]))
    assert shared.compute.forward == pytest.approx(alone.compute.forward / 4)
    gradients = 4 * 64 * 64 * ITEM
    ring = 2 * 3 * 1e-3 + 2 * 3 / 4 * gradients / 1e6 + 3 / 4 * gradients * 3 / BANDWIDTH
    assert (alone.all_reduce, shared.all_reduce) == pytest.approx((0, ring))


def durations_of(times, *, accumulate=True):
    """Durations for `simulate`; every backward adds to earlier gradients, or none."""

    def duration(action):
        stage = times[action.stage]
        return stage.seconds(action.kind) + (action.kind in "BW") * accumulate * stage.compute.accumulate

    return duration


def test_predicted_times_run_in_the_simulation():
    times = stage_times(wide(), [0, 1, 2, 3, 4], cluster(), 1000)
    made = method("1f1b", microbatches=4)
    schedule, rules = made.plan(4)
    one = 1000 * 2 * 64 * 64 / PEAK
    timeline = simulate(schedule, rules, 1, durations_of(times, accumulate=False))
    longer = simulate(schedule, rules, 1, durations_of(times))
    # the first stage's backward is half as long as the others'
    assert timeline.makespan == pytest.approx(one * 3 * (4 + 3) - one + times[0].compute.update)
    assert longer.makespan > timeline.makespan
    assert period(schedule, rules, durations_of(times)) > 0


def test_mistakes():
    with pytest.raises(UsageError, match=r"workers=\[\[0\], \[1, 2\]\] for 2 stages"):
        stage_times(wide(), [0, 2, 4], cluster(), 1, workers=[[0], [1, 2]])
    with pytest.raises(UsageError, match="unknown optimizer 'adan': did you mean 'adam'"):
        stage_times(wide(), [0, 4], cluster(), 1, optimizer="adan")
    with pytest.raises(UsageError, match="no peak for 'bfloat16'"):
        stage_times(replace(wide(), dtype="bfloat16"), [0, 4], cluster(), 1)
    with pytest.raises(UsageError, match="worker 2 of cluster 'c', which has 2"):
        stage_times(wide(), [0, 1, 2, 4], cluster(2), 1)


def test_a_ring_costs_the_same_for_any_number_of_processes():
    """By bandwidth: 2 (P-1)/P N beta, in the limit 2 N beta. Its latency, which the lecture leaves aside, grows."""
    N = 1e9
    sent = {P: formula("ring", P, N).sent for P in (2, 64, 1024, 10_000)}
    assert sent[2] == N
    assert sent[64] == pytest.approx(2 * N, rel=1 / 63)
    assert sent[1024] == pytest.approx(sent[10_000], rel=1e-3)
    assert formula("ring", 1024, N).messages == 2 * 1023
    many = cluster(workers=1, nodes=2048)
    seconds = [gradient_seconds(many, range(P), N, tensors=1) - 2 * (P - 1) * 1e-3 for P in (1024, 2048)]
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-3)


def test_data_against_model_parallelism_with_the_lecture_s_slip_corrected():
    """Its slide gives data parallelism sum beta (P-1)/P d^2: without the 2 of an all-reduce, that it counts elsewhere.

    For many equal layers operator parallelism then seems to win for B < d/3 only; it does for B < 2 d/3.
    """
    d, P, layers = 4096, 64, 1000
    network = [LinearLayer(d, d)] * layers

    def words(grid, batch):
        return price(grid, batch, network).total.words

    def slide(batch):
        share = (P - 1) / P
        model = layers * share * batch * d + 2 * (layers - 1) * share * batch * d
        return layers * share * d * d, model

    for batch, operator_wins, as_the_slide_says in ((d // 4, True, True), (d // 2, True, False), (d, False, False)):
        data, model = slide(batch)
        assert (words(ProcessGrid(P, 1), batch) < words(ProcessGrid(1, P), batch)) == operator_wins
        assert (model < data) == as_the_slide_says
        assert words(ProcessGrid(P, 1), batch) == pytest.approx(model)
        assert words(ProcessGrid(1, P), batch) == pytest.approx(2 * data)
    assert round(best_rows(512, 2048, LinearLayer(4096, 4096))) == 26  # Pr*
