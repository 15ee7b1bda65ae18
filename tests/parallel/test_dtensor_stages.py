"""Stages whose parameters are DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import stretto
from stretto import parallel
from stretto.trainer.backend import in_one_process


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def test_a_trainer_refuses_them_with_the_remedy(mesh):
    stages = [nn.Linear(4, 4), distribute_module(nn.Linear(4, 2), mesh)]
    with in_one_process(), pytest.raises(stretto.UsageError, match=r"stage 1: weight is a DTensor.*parameters='local'"):
        stretto.Trainer(stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), "pipedream")


def test_a_causal_hint_without_a_mask_is_refused(mesh):
    """torch refuses it, too; taken for nothing it would let every position see the later ones."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    parallel.tensor(attention, mesh)
    x = torch.randn(1, 3, 4)
    with pytest.raises(stretto.UsageError, match="attn_mask="):
        attention(x, x, x, is_causal=True)
