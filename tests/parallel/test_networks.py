"""Whole networks on slabs, trained beside one device; what is refused."""

import subprocess
import sys

import pytest

from runtime.processes import launch


@pytest.mark.slow
def test_a_resnet_50_trains_as_on_one_device():
    launch(2, "parallel.scripts:resnet", timeout=300)


@pytest.mark.slow
def test_u_nets_and_free_code_on_a_grid_beside_data():
    launch(4, "parallel.scripts:on_four", timeout=300)


@pytest.mark.slow
def test_networks_with_channels_and_rows_cut_at_once():
    said = set(launch(4, "parallel.scripts:cut_slabs"))
    assert len(said) == 1
    words = ("Linear(in_features=4, out_features=8", "DTensors", "a Slab of an image", 'parameters="local"')
    assert all(word in next(iter(said)) for word in words), said


def test_refusals_name_the_numbers_the_layer_and_the_remedy():
    first, second = launch(2, "parallel.scripts:refusals")
    assert first == second
    for message, parts in zip(
        first,
        (
            ("1 rows along height for 2 processes", "at most 1"),
            ("conv2d in Conv2d with kernel (5, 5): 1 rows along height for 2 processes",),
            ("unfold in Unfold (inner.1)", "collect(slab, mesh)"),
            ("sort in Sorted",),
            ("SyncBatchNorm (1)", "use BatchNorm"),
            ("prepared already",),
            ("(1, 2, 3, 8), (1, 2, 5, 8)", "scatter"),
            ("max_pool2d", "indices"),
            ("('data',)", "init_device_mesh"),
            ("3 dims", "height and width"),
            ("layer_norm in LayerNorm", "dim -2 is cut"),
            ("reflect padding of (8, 8) for 8 rows",),
        ),
        strict=True,
    ):
        assert all(part in message for part in parts), message


def test_the_package_loads_torch_when_it_is_used():
    code = "import sys, stretto; stretto.parallel; assert 'torch' not in sys.modules; dir(stretto.parallel)"
    subprocess.run([sys.executable, "-c", code], check=True)
