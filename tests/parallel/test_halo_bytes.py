"""The rows that plans price are those that processes send: each network's bytes, counted on two processes."""

import pytest
import torch

from parallel.halo_bytes import GRIDS, NETWORKS, SHAPE, SHARES
from runtime.processes import launch
from stretto.measure import layer_costs
from stretto.plan.halos import halo_bytes


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_plans_count_the_bytes_that_two_processes_send():
    counted = launch(2, "parallel.halo_bytes:sent")
    wrong, something = {}, 0
    for name, build in NETWORKS.items():
        layers = layer_costs(build(), torch.randn(SHAPE)).layers
        for grid in GRIDS:
            told = [[0.0, 0.0], [0.0, 0.0]]
            for layer in layers:
                for way, processes in enumerate(halo_bytes(layer, grid, SHAPE[0])):
                    for place, messages in enumerate(processes):
                        told[place][way] += sum(messages)
            for share in (share for share, grids in SHARES.items() if grid in grids):
                real = [list(process[name, grid, share]) for process in counted]
                something += sum(map(sum, real)) > 0
                if told != real:
                    wrong[name, grid, share] = told, real
    assert not wrong, "\n".join(f"{key}: told {told}, sent {real}" for key, (told, real) in wrong.items())
    assert something > len(NETWORKS)
