"""What processes have of a layer that they share."""

import pytest

from stretto.cost.layer_table import Affine, Kernels, Work
from stretto.plan.split_layer_costs import part_of_works


@pytest.mark.parametrize(("fixed", "blocks"), [(True, 2), (False, 6)])
def test_channels_are_dealt_out_with_their_blocks_of_threads(fixed, blocks):
    """Six channels among four processes: two for those that have most. Slabs of images have all of them."""
    kernel = Kernels(1.0, Affine(), Affine(), numbers=Affine(0, 600.0), blocks=6)
    (work,) = part_of_works((Work("batch_norm", 1, Affine(), Affine(), (kernel,)),), 4, fixed=fixed)
    assert [(each.blocks, each.numbers) for each in work.kernels] == [(blocks, Affine(0, 150.0))]
