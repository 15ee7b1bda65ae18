"""The optimizers whose step changes each element of a parameter by that element's gradients and state alone."""

import torch

from stretto.optim.lion import Lion

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.SparseAdam, torch.optim.Adagrad,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.ASGD, torch.optim.Rprop, Lion,
)  # fmt: skip


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to be one of them; a class derived from one may do anything."""
    return type(optimizer) in ELEMENTWISE
