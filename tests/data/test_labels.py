"""Random labels: those of the train split alone, evenly drawn, the same each time."""

import pytest
import torch

from stretto import data
from stretto.errors import UsageError


def test_all_labels_are_drawn():
    plain, drawn = data.load("digits"), data.load("digits", random_labels=True)
    again = data.load("digits", random_labels=1.0, side=8)
    assert torch.equal(drawn.train.y, again.train.y)
    assert torch.equal(drawn.train.x, plain.train.x)
    for split in ("validation", "test"):
        assert torch.equal(getattr(drawn, split).y, getattr(plain, split).y)
    assert (drawn.train.y == plain.train.y).double().mean() == pytest.approx(0.1, abs=0.03)
    shares = torch.bincount(drawn.train.y, minlength=10) / len(drawn.train)
    assert torch.allclose(shares, torch.tensor(0.1), atol=0.03)
    assert drawn.description.endswith("100% of the training labels are drawn at random.")
    assert drawn.options == {"side": 8, "random_labels": 1.0}


def test_a_share_of_them():
    plain, drawn = data.load("digits"), data.load("digits", random_labels=0.3)
    assert (drawn.train.y != plain.train.y).double().mean() == pytest.approx(0.27, abs=0.03)
    assert data.load("digits", random_labels=False).description == plain.description


@pytest.mark.parametrize(("name", "share", "said"), [
    ("digits", 1.5, "random_labels=1.5 must be true, or a share from 0 to 1"),
    ("digits", "all", "random_labels='all' must be true"),
    ("pydoc", True, "is for language: random_labels is for classes"),
])  # fmt: skip
def test_refusals(name, share, said):
    with pytest.raises(UsageError, match=said):
        data.load(name, random_labels=share)
