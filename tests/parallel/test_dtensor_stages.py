"""Stages whose parameters are DTensors."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stretto
from late_imports import Late
from stretto.trainer.backend import in_one_process

tensor = Late("torch.distributed.tensor")


@pytest.fixture
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def test_a_trainer_refuses_them_with_the_remedy(mesh):
    stages = [nn.Linear(4, 4), tensor.distribute_module(nn.Linear(4, 2), mesh)]
    with in_one_process(), pytest.raises(stretto.UsageError, match=r"stage 1: weight is a DTensor.*parameters='local'"):
        stretto.Trainer(stages, nn.functional.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), "pipedream")
