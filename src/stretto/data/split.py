"""The distribution of examples over splits, the same on every machine."""

import torch
from torch import Tensor

# The splits are part of the data set's meaning: another seed would make figures incomparable, so it is no option.
_SEED = 0


def stratify(labels: Tensor, cuts: tuple[float, ...]) -> list[Tensor]:
    """The rows of several splits, shuffled, each with its share of every class in `labels`, int64 [N].

    `cuts` are the shares at which one split ends and the next one begins: (0.6, 0.8) for 60/20/20.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SEED))
    place = torch.empty(len(labels), dtype=torch.float64)  # position of an example within its class, in [0, 1)
    for label in range(int(labels.max()) + 1):
        members = order[labels[order] == label]
        place[members] = torch.arange(len(members), dtype=torch.float64) / len(members)
    split = torch.bucketize(place[order], torch.tensor(cuts, dtype=torch.float64), right=True)
    return [order[split == k] for k in range(len(cuts) + 1)]
