"""A forward that writes to its weights is refused where a method has several versions of them."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import stretto
from stretto import UsageError


def trained(method):
    torch.manual_seed(0)
    given = [nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten()), nn.Linear(8, 3)]
    trainer = stretto.Trainer(
        given, cross_entropy, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), method
    )
    for step in range(3):
        trainer.step(torch.arange(12).view(6, 2) * (step + 1) % 9, torch.arange(6) % 3)
    trainer.flush()
    return given[0][0].weight


@pytest.mark.parametrize("method", ["pipedream", "pipedream-2bw", "spectrain", "pipemare"])
def test_of_several_versions(method):
    with pytest.raises(UsageError, match=r"the forward changes its parameter 0\.weight in place .* several versions"):
        trained(method)


def test_of_one_version():
    assert torch.allclose(trained("gpipe(microbatches=2)"), trained("backprop"))
