"""What calibration makes of measured times: the figures that they were made of."""

import pytest
import torch
from torch import nn

from stretto import UsageError
from stretto.cost import Affine
from stretto.cost.cluster_file import parse, to_toml
from stretto.measure import layer_costs, with_times
from stretto.measure.aten_costs import Operators, sort
from stretto.measure.collective_times import CollectiveTime
from stretto.measure.layer_times import affine
from stretto.measure.machine_calibration import PASSED, SIZES, Findings, cluster_of
from stretto.measure.messages import Passage
from stretto.measure.overhead import Overhead
from stretto.measure.rates import LAYERS, MeasuredCase, cases, rates_of

ALPHA, BETA, GAMMA = 5e-5, 4e-10, 1.5e-10
TRUTH = {"linear": (2e-5, 2e-11, 1e-10), "elementwise": (5e-6, 0.0, 2e-10)}  # t0, per FLOP, per byte


def points(noise=0.0):
    rng = torch.Generator().manual_seed(0)
    found = []
    for operator, (t0, per_flop, per_byte) in TRUTH.items():
        for calls in (1, 4):
            for size in (1e4, 1e6, 1e8):
                for flops in (0.0, 1e3 * size) if per_flop else (0.0,):
                    exact = calls * t0 + flops * per_flop + size * per_byte
                    alone = exact * (1 + noise * float(torch.randn((), generator=rng)))
                    found.append(MeasuredCase(operator, "forward", (calls, flops, size), alone, 1.4 * exact, noise))
    found.append(MeasuredCase("copy", "forward", (1, 0, 1e6), 1e-3, 1e-3))
    return tuple(found)


def times(t0, per_byte):
    return tuple((size, t0 + size * per_byte) for size in SIZES)


def passed(send=(3e-4, 6e-10), receive=(2e-4, 1e-10), travel=(0.0, 0.0)):
    lines = (send, travel, receive)
    return tuple(Passage(size, *(t0 + per_byte * size for t0, per_byte in lines)) for size in PASSED)


def findings(**changes):
    known = {"workers": 2, "per_node": 2, "points": points(), "within": times(ALPHA, BETA), "between": (),
             "within_passages": passed(), "between_passages": (), "overhead": Overhead(2e-5, 1e-3),
             "additions": times(1e-6, GAMMA), "load": 0.5}  # fmt: skip
    return Findings(**{**known, **changes})


def test_alpha_beta_gamma_t0_and_t1_are_recovered():
    cluster = cluster_of(findings())
    link, device = cluster.link(0, 1), cluster.device(0)
    assert (link.latency, link.seconds_per_byte) == pytest.approx((ALPHA, BETA))
    assert device.reduction_seconds_per_byte == pytest.approx(GAMMA)
    assert (device.per_action, device.per_step) == (2e-5, 1e-3)
    assert (link.sending(1e6), link.receiving(1e6)) == pytest.approx((9e-4, 3e-4))
    # The ends take longer than a message does while they are idle.
    assert link.transit == pytest.approx((0, 0), abs=1e-15)
    latency, per_byte = link.transit
    assert link.sending(1e6) + latency + 1e6 * per_byte + link.receiving(1e6) == pytest.approx(1.2e-3)
    assert link.gap == 0  # and messages cannot be closer together than that
    for operator, truth in TRUTH.items():
        rate = device.rates[operator]["forward"]
        assert (rate.per_call, rate.per_flop, rate.per_byte) == pytest.approx(truth)
        assert rate.contention == pytest.approx(1.4)
        assert rate.residual < 1e-9
    assert device.peak_of("float32") == pytest.approx(1e11 / (1e11 * 2e-11 + 1e8 * 1e-10 + 2e-5))
    assert device.memory_bandwidth == pytest.approx(1e9)
    assert parse(to_toml(cluster), "here") == cluster
    assert "load of others when it began: 0.5" in cluster.sources["devices.cpu"]


def test_collectives_are_recovered_and_doubts_are_kept():
    truth = {"gradients": (1e-3, 2e-5, 1e-9), "tensor-sum": (5e-4, 0.0, 2e-9)}
    measured = tuple(
        CollectiveTime(name, tensors, size, per_call + tensors * per_tensor + size * per_byte)
        for name, (per_call, per_tensor, per_byte) in truth.items()
        for tensors, size in ((2.0, 1e3), (32.0, 1e3), (2.0, 1e6), (40.0, 1e7))
    )
    cluster = cluster_of(findings(collectives=measured, load=1.5, points=points(noise=0.2)))
    for name, rates in truth.items():
        found = cluster.links["within"].collectives[name]
        assert (found.per_call, found.per_tensor, found.per_byte) == pytest.approx(rates)
        assert found.processes == 2
    assert [doubt.split(" ")[0] for doubt in cluster.doubts] == ["repeats", "other"]
    assert parse(to_toml(cluster), "here") == cluster
    assert Findings.of(findings(collectives=measured).to_dict()) == findings(collectives=measured)
    assert not cluster_of(findings()).doubts


def test_noise_is_told_and_does_little_harm():
    for operator, rates in rates_of(points(noise=0.03)).items():
        if operator in TRUTH:
            rate = rates["forward"]
            assert (rate.per_call, rate.per_byte) == pytest.approx(TRUTH[operator][::2], rel=0.15)
            assert 0.005 < rate.residual < 0.05


def test_machines_with_a_worker_each_are_joined_by_what_was_measured_between_them():
    apart = {"within": (), "within_passages": (), "between": times(1e-3, 1e-8), "between_passages": passed()}
    cluster = cluster_of(findings(per_node=1, **apart))
    assert (len({place.node for place in cluster.places}), cluster.crowded([0, 1])) == (2, (False, False))
    assert cluster.link(0, 1).latency == pytest.approx(1e-3)
    assert cluster.link(0, 1).gap == pytest.approx(1e-8)  # the wire sets their pace
    assert cluster.link(0, 1).transit == pytest.approx((0, 1e-8 - 7e-10))  # and no byte is faster than it
    travelling = cluster_of(findings(**{**apart, "per_node": 1, "between_passages": passed(travel=(3e-5, 2e-8))}))
    assert travelling.link(0, 1).transit == pytest.approx((3e-5, 2e-8))
    assert parse(to_toml(travelling), "here") == travelling
    assert Findings.of(findings().to_dict()) == findings()


def test_every_case_is_work_of_its_sort():
    every = list(cases(quick=True))
    beside = {"copy", "qr", "products", "bfloat16-products", "sgd", "adam"}
    assert {case.operator for case in every} == {operator for operator, _ in LAYERS} | beside
    for case in every:
        calls, flops, num_bytes = case.amounts
        assert calls >= 1
        assert num_bytes > 0
        products = ("linear", "convolution", "attention", "qr", "products", "bfloat16-products")
        assert (flops > 0) == (case.operator in products), case.operator
        case.call()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convolution_backward", "convolution"), ("_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("native_layer_norm_backward", "layer-norm"), ("max_pool2d_with_indices", "pooling"),
        ("embedding_dense_backward", "embedding"), ("_log_softmax_backward_data", "transcendental"), ("bmm", "linear"),
        ("add", "elementwise"), ("expand_copy", "elementwise"), ("logical_and", "elementwise"), ("comm", "elementwise"),
    ],
)  # fmt: skip
def test_sorts(name, expected):
    assert sort(name) == expected


def test_views_cost_nothing_and_a_look_up_its_rows():
    x = torch.zeros(4, 6)
    with Operators() as operators:
        x.view(24).view(2, 12).transpose(0, 1).detach()
    assert not operators.done
    with Operators() as operators:
        nn.functional.embedding(torch.tensor([1, 2]), torch.zeros(1000, 8))
    assert operators.done["embedding"] == [1, 0, 2 * 8 + 2 * 2 * 8 * 4]


def test_measured_layers_have_lines_in_the_batch():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), nn.ReLU(), nn.Linear(64, 8)]
    before = {key: value.clone() for key, value in nn.Sequential(*layers).state_dict().items()}
    costs = layer_costs(layers, torch.zeros(4, 64), loss=nn.functional.cross_entropy, target=torch.zeros(4).long())
    examples = [torch.randn(n, 64) for n in (4, 64, 256)]

    def sgd(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    timed = with_times(costs, layers, examples, optimizer=sgd, repeats=3)
    first, relu, last, loss = (row.measured for row in timed.layers)
    assert loss is None
    assert not first.crowded
    assert min(first.accumulate, relu.accumulate, timed.step) >= 0
    assert min(each.forward.at(64) for each in (first, relu, last)) > 0
    assert min(each.at(64) for each in (last.backward, last.input_gradient, last.weight_gradient)) > 0
    assert (first.input_gradient, relu.weight_gradient, relu.update) == (Affine(), Affine(), 0.0)
    assert first.update > 0
    assert 0 < timed.start < 0.01
    assert all(torch.equal(before[key], value) for key, value in nn.Sequential(*layers).state_dict().items())
    assert timed.stages([0, 3, 4])[0].measured.forward.at(4) > 0
    assert all(parameter.grad is None for layer in layers for parameter in layer.parameters())
    targets = [torch.zeros(n).long() for n in (4, 64, 256)]
    judge = {"loss": nn.functional.cross_entropy, "targets": targets}
    judged = with_times(costs, layers, examples, **judge, optimizer=sgd, repeats=1, crowded=True)
    loss = judged.layers[3].measured
    assert min(loss.forward.at(64), loss.backward.at(64)) > 0
    assert (loss.update, loss.crowded) == (0.0, True)
    with pytest.raises(UsageError, match=r"examples of the batch sizes \[4\]"):
        with_times(costs, layers, [torch.zeros(4, 64)])
    with pytest.raises(UsageError, match="1 targets for 3 examples"):
        with_times(costs, layers, examples, loss=nn.functional.cross_entropy, targets=targets[:1])


def test_a_line_through_measured_batches():
    found, residual = affine([(b, 2e-4 + 3e-6 * b) for b in (1, 8, 64)])
    assert (found.fixed, found.each) == pytest.approx((2e-4, 3e-6))
    assert residual < 1e-9
    # utilisation b / (b + t0 / t1), the lecture's curve: half at t0 / t1 examples
    assert 64 / (64 + found.fixed / found.each) == pytest.approx(64 * found.each / found.at(64))


def test_unequal_workers_have_speeds_in_figures_of_the_first():
    """What all measured together is the slowest worker's, or a mean over workers: the first one's share is kept."""
    slow = cluster_of(findings(speed_rounds=tuple((0.25, 0.5) for _ in range(9))))
    even = cluster_of(findings(speed_rounds=tuple((0.25, 0.26) for _ in range(9))))
    assert even.groups[0].speeds is None
    assert "none steadily slower than another: worker 1 takes 1.04 times" in even.sources["groups.speeds"]
    assert slow.groups[0].speeds == (1, 0.5)
    assert "worker 1 takes 2.00 times as long" in slow.sources["groups.speeds"]
    assert slow.device(0).rates["linear"]["forward"].contention == 1  # all together took 1.4 times as long
    assert slow.device(0).per_action == pytest.approx(even.device(0).per_action / 1.5)
    assert slow.device(1).per_action == pytest.approx(2 * slow.device(0).per_action)
    assert slow.device(1).peak_of("float32") == pytest.approx(even.device(0).peak_of("float32") / 2)
    assert parse(to_toml(slow), "here") == slow


def test_unequal_nodes_are_groups():
    known = {"workers": 4, "between": times(ALPHA, BETA), "between_passages": passed()}
    cluster = cluster_of(findings(**known, speed_rounds=tuple((0.25, 0.25, 0.5, 0.25) for _ in range(9))))
    assert [group.speeds for group in cluster.groups] == [(1, 1), (0.5, 1)]
    assert cluster.link(1, 2) == cluster.links["between"]
    alike = cluster_of(findings(**known, speed_rounds=tuple((0.25, 0.5, 0.25, 0.5) for _ in range(9))))
    assert [(group.nodes, group.speeds) for group in alike.groups] == [(2, (1, 0.5))]
