"""Optimizers that need whole matrices are refused where a process has parts of them, by name and with a remedy."""

from functools import partial

import pytest
import torch
from torch import nn

import stretto
from stretto.optim import LAMB, LARS, SOAP, Lion, labels_of, muon
from stretto.optim.traits import check_shares, refuse_parts

NET = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(muon, labels=labels_of(NET)), r"Muon needs whole matrices.*tensor=2, stage 1.*Lion"),
        (SOAP, "SOAP needs whole matrices"),
        (partial(LARS, lr=0.1), "LARS needs the norms of whole layers"),
        (LAMB, "LAMB needs the norms of whole layers"),
    ],
    ids=["muon", "soap", "lars", "lamb"],
)
def test_on_a_tensor_axis(make, message):
    with pytest.raises(stretto.UsageError, match=message):
        refuse_parts(make(NET.parameters()), "tensor=2", 1)


def test_what_works_on_each_element_is_not_refused():
    without = muon(NET[1].parameters(), labels=labels_of(NET[1]))  # the output layer alone: AdamW
    for optimizer in (Lion(NET.parameters()), torch.optim.AdamW(NET.parameters()), without):
        refuse_parts(optimizer, "tensor=2", 0)
        check_shares(optimizer, 0)


def test_without_nesterov_a_bfloat16_average_stays_an_average():
    weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).bfloat16())
    optimizer = muon([weight], exclude=[], nesterov=False, momentum=0.5)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full_like(weight, 1.0))
