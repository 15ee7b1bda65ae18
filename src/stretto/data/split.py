"""Which examples of a data set are in which split: the same on every machine."""

import torch
from torch import Tensor

# The splits are part of the data set's meaning: another seed would make figures incomparable, so it is no option.
_SEED = 0


def stratify(labels: Tensor, cuts: tuple[float, ...]) -> list[Tensor]:
    """Draw the rows of several splits, each with its share of every class in `labels` [N], shuffled.

    `cuts` are the shares at which one split ends and the next begins.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
    place = torch.empty(len(labels), dtype=torch.float64)  # where an example stands in its class, as a share in [0, 1)
    for label in range(int(labels.max()) + 1):
        members = order[labels[order] == label]
        place[members] = torch.arange(len(members), dtype=torch.float64) / len(members)
    split = torch.bucketize(place[order], torch.tensor(cuts, dtype=torch.float64), right=True)
    return [order[split == k] for k in range(len(cuts) + 1)]
