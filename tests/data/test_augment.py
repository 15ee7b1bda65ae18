"""Crops and mirrors against a plain loop."""

import torch

from stretto.data.cifar import crop_and_flip


def test_every_image_is_a_crop_of_its_padded_self_mirrored_or_not():
    torch.manual_seed(0)
    x = torch.randn(40, 3, 6, 5)
    out = crop_and_flip(x, torch.Generator().manual_seed(1), margin=2)
    seen = set()
    for image, made in zip(x, out, strict=True):
        padded = torch.zeros(3, 10, 9)
        padded[:, 2:8, 2:7] = image
        crops = {(top, left): padded[:, top : top + 6, left : left + 5] for top in range(5) for left in range(5)}
        found = {(*place, False) for place, crop in crops.items() if torch.equal(made, crop)}
        found |= {(*place, True) for place, crop in crops.items() if torch.equal(made, crop.flip(2))}
        assert len(found) == 1
        seen |= found
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(5))
    assert {mirrored for _, _, mirrored in seen} == {False, True}
