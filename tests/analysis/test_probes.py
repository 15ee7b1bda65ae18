"""Probes find what is linear, and only that; filters are drawn as they are."""

import pytest
import torch
from torch import nn

from stretto.analysis.filters import MOST_FILTERS, filters
from stretto.analysis.linear_probes import WIDEST, probes


class Product(nn.Module):
    def forward(self, x):
        return torch.stack([x[:, 0] * x[:, 1], x[:, 1]], 1)


def corners(count, seed):
    """Points around (+-1, +-1), and whether both signs are the same."""
    g = torch.Generator().manual_seed(seed)
    x = 2.0 * torch.randint(2, (count, 2), generator=g) - 1 + 0.2 * torch.randn(count, 2, generator=g)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def test_separable_data_reach_one():
    """The sign of a sum, with a gap: no errors. The exclusive or: none behind a stage that multiplies."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 10, generator=g)
    x = x[x.sum(1).abs() > 2]
    y = (x.sum(1) > 0).long()
    torch.manual_seed(0)
    assert probes([nn.Identity(), nn.Linear(10, 10)], (x[:400], y[:400]), (x[400:], y[400:])) == (1.0, 1.0)
    raw, multiplied = probes([nn.Identity(), Product()], corners(400, 1), corners(400, 2))
    assert multiplied == 1.0
    assert raw < 0.8


def test_chance_is_chance():
    g = torch.Generator().manual_seed(0)
    train, test = ((torch.randn(500, 5, generator=g), torch.randint(4, (500,), generator=g)) for _ in range(2))
    (found,) = probes([nn.Identity()], train, test)
    assert found == pytest.approx(0.25, abs=0.08)


def test_a_target_for_each_position_and_wide_images():
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, (60, 7), generator=g)
    assert probes([nn.Embedding(5, 4), nn.Identity()], (tokens[:40], tokens[:40]), (tokens[40:], tokens[40:])) == (1, 1)
    images = torch.randn(80, 3, 20, 20, generator=g)
    y = torch.arange(80) % 2
    images += y[:, None, None, None]
    assert images[0].numel() > WIDEST
    assert probes([nn.Identity(), nn.Flatten()], (images[:60], y[:60]), (images[60:], y[60:])) == (1, 1)


def test_stages_without_a_place_for_each_target_have_none():
    x, y = torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3, dtype=torch.int64)
    pooled = nn.Sequential(nn.Embedding(2, 4), nn.Flatten())
    assert probes([nn.Identity(), pooled], (x, y), (x, y)) == (None, None)


@pytest.mark.parametrize("padding", [-100, -1])
def test_targets_that_ask_for_nothing_do_not_count(padding):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 5, (60, 7), generator=g)
    y = tokens.where(torch.rand(60, 7, generator=g) < 0.5, padding)
    tokens[y == padding] = 0
    assert probes([nn.Embedding(5, 4)], (tokens[:40], y[:40]), (tokens[40:], y[40:])) == (1,)


def test_the_channels_of_a_square_image_are_no_rows():
    """Of each pixel the first channel says what it is; there are as many channels as rows and columns."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(2, (20, 4, 4), generator=g)
    x = torch.randn(20, 4, 4, 4, generator=g)
    x[:, 0] = 2.0 * y - 1
    stages = [nn.Identity(), nn.AvgPool2d(2)]
    assert probes(stages, (x[:10], y[:10]), (x[10:], y[10:])) == (1, None)


def test_filters_are_scaled_by_their_ends():
    conv = nn.Conv2d(2, 3, (1, 2))
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[0.0, 1, 2, 4], [-1, -1, -1, 0], [5, 5, 5, 5]]).reshape(3, 2, 1, 2))
    found = filters(nn.Sequential(nn.Identity(), conv), (2, 8, 8))
    assert (found.channels, found.height, found.width) == (2, 1, 2)
    assert found.pictures == ("004080ff", "000000ff", "00000000")


def test_the_rows_of_a_linear_are_images_where_it_takes_images():
    linear = nn.Linear(12, 50)
    found = filters(nn.Sequential(nn.Flatten(), linear), (3, 2, 2))
    assert (found.channels, found.height, found.width, len(found.pictures)) == (3, 2, 2, MOST_FILTERS)
    assert filters(nn.Sequential(nn.Flatten(), linear), (12,)) is None
    assert filters(nn.Sequential(nn.Embedding(4, 4), linear), (3, 2, 2)) is None
    assert filters(nn.ReLU(), (3, 2, 2)) is None
