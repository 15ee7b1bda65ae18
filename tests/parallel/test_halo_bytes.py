"""The rows that plans price are those that processes send: each network's bytes, counted on two processes."""

import pytest
import torch

from parallel.halo_bytes import CHANNELS, EVEN, FEW, GRIDS, LARGE, NETWORKS, SHAPE, SHARES, large
from runtime.processes import launch
from stretto.measure import layer_costs
from stretto.measure.tensor_costs import tensor_costs
from stretto.plan.split_layer_costs import by_space, halo_bytes


@pytest.mark.parametrize("names", [FEW, pytest.param(list(NETWORKS), marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_plans_count_the_bytes_that_two_processes_send(names):
    counted = launch(2, "parallel.halo_bytes:sent", names)
    wrong, something = {}, 0
    for name in names:
        layers = layer_costs(NETWORKS[name](), torch.randn(SHAPE)).layers
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
    assert something > len(names)


@pytest.mark.slow
def test_plans_count_the_bytes_of_rows_and_channels_that_four_processes_send():
    """And about those that they keep: halos, copied beside a slab, are not counted."""
    told = {}
    for name, build in CHANNELS.items():
        layers = tensor_costs(build(), torch.randn(EVEN), 2).layers
        slabs = [by_space(layer, 2, side=0 if "Linear" in layer.type else 12) for layer in layers]
        channels = [
            sum(work.bytes.at(EVEN[0]) for layer in slabs for work in getattr(layer, f"{way}_exchanges"))
            for way in ("forward", "backward")
        ]
        halos = [halo_bytes(layer, (2, 1), EVEN[0]) for layer in slabs]
        rows = [[sum(sum(way[place]) for way in ways) for ways in zip(*halos, strict=True)] for place in (0, 1)]
        told[name] = rows, channels
    rows = [by_space(layer, 2, side=64) for layer in tensor_costs(large(), torch.randn(LARGE), 2).layers]
    held = sum((layer.activation - layer.shared).at(LARGE[0]) for layer in rows)
    for rank, (counted, really) in enumerate(launch(4, "parallel.halo_bytes:sent_of_channels")):
        assert held == pytest.approx(really, rel=0.06)
        for name, (rows, channels) in told.items():
            sent_rows, sent_channels = counted[name]
            assert list(sent_rows) == rows[rank % 2], name
            assert list(sent_channels) == channels, name
