"""What Muon and SOAP keep and compute on paper: their state as torch holds it, their products as torch counts them."""

from dataclasses import replace
from functools import cache, reduce

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stretto
from stretto.cost import Rate, find_cluster, layer_costs
from stretto.cost.cure_costs import basis_refresh, basis_step, matrix_bytes, newton_schulz, rotation_works
from stretto.cost.layer_table import ModelCosts
from stretto.cost.stage_prediction import Machine, cure_seconds, matrix_seconds, update_seconds
from stretto.methods.cure import StepCure
from stretto.optim import SOAP, RotatedAdam, labels_of, muon
from stretto.optimizers import OPTIMIZERS, REFRESH_EVERY, BasisWork, MatrixWork, Stepping, optimizer_of
from stretto.plan.problem import Problem
from stretto.plan.search_space import tensors_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4))


@cache
def costs_of_model():
    return layer_costs(list(model()), torch.randn(2, 12))


def step_of(name, net):
    make = {"muon": lambda: muon(net.parameters(), labels=labels_of(net)), "soap": lambda: SOAP(net.parameters())}
    optimizer = make[name]()
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def numbers_of(optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in states if isinstance(value, torch.Tensor) and value.dim())


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_state_and_products_are_torchs(name):
    net = model()
    costs = costs_of_model()
    row = OPTIMIZERS[name]
    assert sum(layer.state_bytes(row) for layer in costs.layers) == 4 * numbers_of(step_of(name, net))
    optimizer = step_of(name, net)  # SOAP's first gradient moves nothing
    bases = reduce(BasisWork.__add__, (layer.matrices.bases for layer in costs.layers))
    refresh = flops_of(basis_refresh(bases, 4, turns_second_moments=False)) * (name == "soap")
    for number in range(2, 12):  # SOAP refreshes in its step 10, of which the first is none
        works = [newton_schulz(x.matrices) if name == "muon" else basis_step(x.matrices.bases, 4) for x in costs.layers]
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        assert sum(map(flops_of, works)) + refresh * (number == 11) == counter.get_total_flops()


def flops_of(works):
    return sum(work.flops.at(0) for work in works if work.operator == "linear")


ROTATED = ("pipedream(rotate=True, refresh=3)", "pipedream(rotate=one-sided, refresh=3)")


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotation_keeps_and_computes_what_its_equations_say(name):
    """Of a matrix [n, m], by reference.md, section 9; torch's counter counts all products but those inside a QR."""
    net, two_sided = model(), "True" in name
    shapes = [(20, 12), (8, 20), (4, 8)]
    turned = [(n, m, [n, m] if two_sided else [n]) for n, m in shapes]
    averages_and_bases = sum(2 * side**2 for _, _, sides in turned for side in sides)  # L and U, R and V
    products = sum(4 * 2 * side * n * m for n, m, sides in turned for side in sides)  # G G^T, U^T G, U^T M, U step
    refreshes = sum(2 * 2 * side**3 + 2 * side * n * m for n, m, sides in turned for side in sides)  # L U, U'^T U; S
    factors = sum(8 / 3 * side**3 for _, _, sides in turned for side in sides)

    costs = costs_of_model()
    cure = StepCure(interval=3, two_sided=two_sided)
    step, again = (
        [work for layer in costs.layers for work in rotation_works(cure, layer, Stepping("adamw"))[kind]]
        for kind in (0, 1)
    )
    assert (flops_of(step), flops_of(again)) == (products, refreshes)
    assert sum(work.flops.at(0) for work in again) == pytest.approx(refreshes + factors)
    kept = sum(matrix_bytes(cure, layer, Stepping("adamw")) for layer in costs.layers)
    assert kept == 4 * averages_and_bases

    optimizer = torch.optim.AdamW(net.parameters())
    rotated = RotatedAdam(optimizer, 3, two_sided=two_sided)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    for number in range(5):
        with FlopCounterMode(display=False) as counter:
            rotated.step()
        # torch counts no addmm_, which is G G^T: one of the four products
        assert counter.get_total_flops() == 3 / 4 * products + refreshes * (number % 3 == 0)
    assert numbers_of(optimizer) == averages_and_bases + 2 * sum(p.numel() for p in net.parameters())


def test_a_shared_matrix_is_turned_once():
    embed, out = nn.Linear(6, 12, bias=False), nn.Linear(6, 12, bias=False)
    out.weight = embed.weight
    costs = layer_costs([embed, nn.Linear(12, 6), out], torch.randn(2, 6))
    assert [layer.matrix_shapes for layer in costs.layers] == [((12, 6),), ((6, 12),), ()]
    (stage,) = costs.stages([0, 3])
    numbers = 2 * (72 + 78) + 2 * 2 * (12**2 + 6**2)
    assert stage.state_bytes(optimizer_of("soap")) == 4 * numbers


def test_rows_add_up_and_go_through_json():
    costs = costs_of_model()
    first, second = (MatrixWork.of(*shape, hidden=True) for shape in ((20, 12), (8, 20)))
    assert [layer.matrices for layer in costs.layers[:3:2]] == [first, second]
    assert costs.layers[0].then(costs.layers[1]).then(costs.layers[2]).matrices == first + second
    assert costs.layers[4].matrices == MatrixWork.of(4, 8, hidden=False)
    assert ModelCosts.of(costs.to_dict()).layers[0].matrices == first


def test_a_step_takes_the_products_beside_the_accesses():
    (layer,) = layer_costs([nn.Sequential(nn.Linear(2048, 4096, bias=False), nn.Linear(4096, 2))], torch.randn(1, 2048),
                           fake=True).layers  # fmt: skip
    machine = Machine(find_cluster("8-a100").device(0), "float32")
    muon_row = OPTIMIZERS["muon"]
    flops = 5 * (4 * 2048**2 * 4096 + 2 * 2048**3)
    assert flops_of(newton_schulz(layer.matrices)) == flops
    seconds = matrix_seconds(layer, muon_row, machine)
    assert seconds >= flops / machine.device.peak_of("bfloat16")
    assert update_seconds(layer, machine, "muon") == update_seconds(layer, machine, "adamw") + seconds


def test_muon_goes_by_the_rate_of_products_in_bfloat16_where_there_is_one():
    (layer,) = layer_costs([nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 2))], torch.randn(1, 8)).layers
    rates = {name: {"forward": Rate(per_flop=rate)} for name, rate in (("linear", 1.0), ("bfloat16-products", 8.0))}
    device = replace(find_cluster("16-workstations").device(0), rates=rates)
    flops = 5 * (4 * 8**2 * 16 + 2 * 8**3)
    assert matrix_seconds(layer, OPTIMIZERS["muon"], Machine(device, "float32")) == 8 * flops


def test_bases_go_by_the_rate_of_products_where_there_is_one():
    (layer,) = layer_costs([nn.Linear(8, 16, bias=False)], torch.randn(1, 8)).layers
    rates = {name: {"forward": Rate(per_flop=rate)} for name, rate in (("linear", 1.0), ("products", 8.0), ("qr", 0.0))}
    device = replace(find_cluster("16-workstations").device(0), rates=rates)
    flops = 8 * (8**2 * 16 + 8 * 16**2)
    refreshed = 2 * (8**3 + 16**3)
    seconds = matrix_seconds(layer, OPTIMIZERS["soap"], Machine(device, "float32"))
    assert seconds == pytest.approx(8 * (flops + refreshed / REFRESH_EVERY))
    cure = StepCure(interval=10)
    found = cure_seconds(cure, layer, Machine(device, "float32"), Stepping("adamw"))
    assert found.step == pytest.approx(8 * flops)


def test_tensor_axes_are_left_out():
    costs = costs_of_model()
    given = {"costs": costs, "cluster": find_cluster("8-a100"), "workers": 8, "batch_sizes": (64,)}
    assert tensors_of(Problem(**given, optimizer="muon")) == (1,)
    assert len(tensors_of(Problem(**given, optimizer="lion"))) > 1
    with pytest.raises(stretto.UsageError, match="tensors lists 2, but optimizer 'soap' needs whole layers"):
        Problem(**given, optimizer="soap", tensors=(1, 2))
