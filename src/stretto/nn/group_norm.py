"""Norms that do not look across the batch: what single examples and micro-batches need."""

import logging

from torch import nn

from stretto.errors import UsageError
from stretto.options.checks import is_whole, of_kind, shown

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)  # until a forward has told them their channels


def group_norm(module: nn.Module, *, group_size: int = 2) -> nn.Module:
    """Replace every BatchNorm in `module` by a GroupNorm, in place, and return the module.

    A module that is itself a BatchNorm cannot be replaced in place: then the GroupNorm is returned. Groups have
    `group_size` channels, or the next smaller number that divides the channels. A BatchNorm1d gets one group of all
    channels: behind a Linear a group of two has two numbers an example, and normalised they are 1 and -1. Weight and
    bias stay the same parameters, so an optimizer made before goes on training them; eps is kept, running statistics
    are dropped. How many were replaced goes to the logger "stretto". Raises UsageError if there is none.
    """
    of_kind("module", module, nn.Module, "an nn.Module with BatchNorms in it")
    if not is_whole(group_size) or group_size < 1:
        raise UsageError(f"group_size={shown(group_size)}: a whole number of channels, at least 1")
    lazy = [name or type(part).__name__ for name, part in module.named_modules() if isinstance(part, LAZY)]
    if lazy:
        raise UsageError(f"group_norm: {', '.join(lazy)} do not know their channels yet: run a forward first")
    found = [part for part in module.modules() if isinstance(part, BatchNorm)]
    if not found:
        raise UsageError(f"group_norm: this {type(module).__name__} has no BatchNorm to replace")
    made = {part: like(part, group_size) for part in found}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        parent, _, name = path.rpartition(".")
        if isinstance(part, BatchNorm) and name:
            setattr(module.get_submodule(parent), name, made[part])
    logging.getLogger("stretto").info("group_norm: %d BatchNorm replaced", len(made))
    return made[module] if isinstance(module, BatchNorm) else module


def like(norm: BatchNorm, group_size: int) -> nn.GroupNorm:
    """A GroupNorm for a BatchNorm's channels, with its weight and bias."""
    channels = norm.num_features
    wanted = channels if isinstance(norm, nn.BatchNorm1d) else min(group_size, channels)
    size = next(size for size in range(wanted, 0, -1) if channels % size == 0)
    made = nn.GroupNorm(channels // size, channels, eps=norm.eps, affine=norm.affine)
    made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)
