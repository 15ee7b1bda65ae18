"""Blocks of a stage's own in front of a copy of the output head, for transformers that are trained by local losses.

A head of one Linear asks of a stage's output that tokens can be read off it at once, which is the last stage's task and
not its own; `blocks` gives each stage some blocks that do the reading, as the layers behind it will. They start as
copies of the model's last blocks and are trained by this stage's loss alone. What AugLocal copies are whole stages;
these are single blocks, so that a head does not grow with the stages.
"""

from collections.abc import Sequence

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.heads.auglocal import Copies
from stretto.heads.head import REMEDY, Site
from stretto.heads.solo import flattened, readout
from stretto.nn import deferred
from stretto.nn.batch import as_tuple
from stretto.nn.deferred import RemoteStage
from stretto.nn.preserve import undisturbed
from stretto.options.named import whole


def blocks(at: Site, *, depth: int = 1) -> nn.Module:
    """Copies of the model's last `depth` blocks and of its readout, [N, T, d] -> [N, T, V].

    A weight that the readout shares with the embedding is copied, too: the head trains its own. Raises UsageError if
    the model does not end in so many blocks of the stage's width and a readout, if several processes share a stage, or
    if one that is copied from lives in another process.
    """
    whole("head 'blocks'", "depth", depth)
    network = at.network
    assert network is not None, "the head is a copy of the network's last layers"
    if network.shared:
        raise UsageError(f"head 'blocks' copies layers, but several processes share a stage's weights. {REMEDY}")
    layers = last_layers(network.stages, depth)
    if layers is None:
        raise UsageError(
            f"head 'blocks' is a copy of the model's last {depth} blocks and of its readout, a norm and a Linear, or a "
            f"Linear; the stages that are modules here do not end in that many layers: use a smaller depth, or "
            f"head='language'. {REMEDY}"
        )
    head = Copies(deferred.deep_copy(layer).to(at.features[0].device) for layer in layers)
    try:
        with undisturbed([head], at.features[0].device), torch.no_grad():
            fits = as_tuple(head(*at.features))[0].shape == at.output.shape
    except (RuntimeError, TypeError, ValueError):
        fits = False
    if not fits:
        names = ", ".join(type(layer).__name__ for layer in layers)
        raise UsageError(
            f"head 'blocks' leads a stage's output through copies of the model's last layers ({names}), but "
            f"{at.shapes}, and they do not lead from one to the other: use head='auglocal' or 'language'. {REMEDY}"
        )
    return head


def last_layers(stages: Sequence[nn.Module], depth: int) -> list[nn.Module] | None:
    """The model's last `depth` layers before the readout, and the readout; None if there are not that many."""
    end = None if isinstance(stages[-1], RemoteStage) else readout(stages[-1])
    if end is None:
        return None
    layers: list[nn.Module] = []
    for stage in reversed(stages):
        if isinstance(stage, RemoteStage):
            break
        layers = [*flattened(stage), *layers]
        own = [layer for layer in layers if not any(layer is part for part in (end, *end.children()))]
        if len(own) >= depth:
            return [*own[-depth:], end]
    return None
