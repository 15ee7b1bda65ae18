"""What Muon and SOAP keep and compute on paper: their state as torch holds it, their products as torch counts them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stretto
from stretto.cost import find_cluster, layer_costs
from stretto.cost.layer_table import ModelCosts
from stretto.cost.stage_prediction import Machine, matrix_seconds, update_seconds
from stretto.optim import SOAP, labels_of, muon
from stretto.optimizers import OPTIMIZERS, MatrixWork
from stretto.plan.problem import Problem
from stretto.plan.search_space import tensors_of


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4))


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
    costs = layer_costs(list(net), torch.randn(2, 12))
    row = OPTIMIZERS[name]
    assert sum(layer.state_bytes(row) for layer in costs.layers) == 4 * numbers_of(step_of(name, net))
    optimizer = step_of(name, net)  # SOAP's first gradient moves nothing
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    products = [replace(layer.matrices, refresh=0.0) for layer in costs.layers]  # none in this step
    assert sum(map(row.flops, products)) == counter.get_total_flops()


def test_rows_add_up_and_go_through_json():
    costs = layer_costs(list(model()), torch.randn(2, 12))
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
    assert muon_row.flops(layer.matrices) == flops
    seconds = matrix_seconds(layer, muon_row, machine)
    assert seconds >= flops / machine.device.peak_of("bfloat16")
    assert update_seconds(layer, machine, "muon") == update_seconds(layer, machine, "adamw") + seconds


def test_tensor_axes_are_left_out():
    costs = layer_costs(list(model()), torch.randn(2, 12))
    given = {"costs": costs, "cluster": find_cluster("8-a100"), "workers": 8, "batch_sizes": (64,)}
    assert tensors_of(Problem(**given, optimizer="muon")) == (1,)
    assert len(tensors_of(Problem(**given, optimizer="lion"))) > 1
    with pytest.raises(stretto.UsageError, match="tensors lists 2, but optimizer 'soap' needs whole layers"):
        Problem(**given, optimizer="soap", tensors=(1, 2))
