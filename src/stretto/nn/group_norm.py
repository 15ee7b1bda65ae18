"""Replaces BatchNorm by GroupNorm, whose output for an example does not depend on the rest of the micro-batch."""

import logging
from collections.abc import Iterable

from torch import nn

from stretto.errors import UsageError
from stretto.options.checks import is_whole, of_kind, shown

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
LAZY = nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d  # the number of channels is unknown yet


def has_batch_norm(modules: Iterable[object]) -> bool:
    """Whether some module among these has a BatchNorm, one that does not know its channels yet included."""
    found = (part for module in modules if isinstance(module, nn.Module) for part in module.modules())
    return any(isinstance(part, BatchNorm | LAZY) for part in found)


def uses_batch_statistics(modules: Iterable[object]) -> bool:
    """Whether some module among these has a BatchNorm that normalises by its batch in training."""
    found = (part for module in modules if isinstance(module, nn.Module) for part in module.modules())
    return any(isinstance(part, BatchNorm | LAZY) and (part.training or part.running_mean is None) for part in found)


def parted_norms(parts: str) -> str:
    """What to say of batch norms where a minibatch is cut into `parts`."""
    return (
        f"batch norms normalise each of {parts} by itself: this trains as plain PyTorch does with gradients "
        "accumulated over them, not as on whole minibatches. With stretto.group_norm(model) both are the same, and "
        "microbatches=1 cuts nothing"
    )


def group_norm(module: nn.Module, *, group_size: int = 2) -> nn.Module:
    """Replace every BatchNorm in `module` by a GroupNorm, in place, and return the module.

    A module that is itself a BatchNorm cannot be replaced in place: then the GroupNorm is returned. Groups have
    `group_size` channels, or the next smaller number that divides the channels. A BatchNorm1d becomes one group of all
    channels: after a Linear, a group of two has two numbers an example, which normalise to 1 and -1. Weight and bias
    stay the same parameters, so an optimizer made before still trains them; eps is kept, running statistics are
    dropped. The number of replaced modules is logged to "stretto". Raises UsageError if there is no BatchNorm.
    """
    of_kind("module", module, nn.Module, "an nn.Module with BatchNorms in it")
    if not is_whole(group_size) or group_size < 1:
        raise UsageError(f"group_size={shown(group_size)}: a whole number of channels, at least 1")
    lazy = [name or type(part).__name__ for name, part in module.named_modules() if isinstance(part, LAZY)]
    if lazy:
        raise UsageError(f"group_norm: {', '.join(lazy)} do not know their channels yet: run a forward first")
    batch_norms = [part for part in module.modules() if isinstance(part, BatchNorm)]
    if not batch_norms:
        raise UsageError(f"group_norm: this {type(module).__name__} has no BatchNorm to replace")
    replacements = {part: group_norm_for(part, group_size) for part in batch_norms}
    for path, part in list(module.named_modules(remove_duplicate=False)):
        parent, _, name = path.rpartition(".")
        if isinstance(part, BatchNorm) and name:
            setattr(module.get_submodule(parent), name, replacements[part])
    logging.getLogger("stretto").info("group_norm: %d BatchNorm replaced", len(replacements))
    return replacements[module] if isinstance(module, BatchNorm) else module


def group_norm_for(norm: BatchNorm, group_size: int) -> nn.GroupNorm:
    """A GroupNorm over a BatchNorm's channels, with the same weight, bias, eps and mode."""
    channels = norm.num_features
    largest = channels if isinstance(norm, nn.BatchNorm1d) else min(group_size, channels)
    size = next(size for size in range(largest, 0, -1) if channels % size == 0)
    replacement = nn.GroupNorm(channels // size, channels, eps=norm.eps, affine=norm.affine)
    replacement.weight, replacement.bias = norm.weight, norm.bias
    return replacement.train(norm.training)
