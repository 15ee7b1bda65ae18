"""A readout that all stages of a language model share (the idea of SOLO, arXiv 2609.35440).

A head is a copy of the model's own norm and unembedding (its readout), which only the last stage's loss trains. The
paper's text could not be retrieved, so the refreshing of copies is ours: after an update of the last stage its readout
travels to the earlier stages, like tied weights. With S stages, the forward of micro-batch m on stage s reads exactly
the version after the update that contains micro-batch m - (S - s); with `every`, the newest version of each `every`-th
update up to that one. So a stage with a worker of its own never waits for a readout, and placement does not change the
results.

Blocks of a stage's own in front of a copy of the output head, for transformers that are trained by local losses.

A head of one Linear asks of a stage's output that tokens can be read off it at once, which is the last stage's task and
not its own; `blocks` gives each stage some blocks that do the reading, as the layers behind it will. They start as
copies of the model's last blocks and are trained by this stage's loss alone. What AugLocal copies are whole stages;
these are single blocks, so that a head does not grow with the stages.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.auglocal import Copies
from stretto.heads.head import REMEDY, ReadingHead, Site, WeightReading
from stretto.nn import deferred
from stretto.nn.batch import as_tuple
from stretto.nn.deferred import RemoteStage
from stretto.nn.preserve import undisturbed
from stretto.options.named import whole


def solo(at: Site, *, every: int = 1) -> nn.Module:
    """A copy of the model's readout, refreshed after each `every`-th update.

    Raises UsageError if the last stage does not end in a readout of the stage's width, if several processes share it,
    or if it lives in another process.
    """
    whole("head 'solo'", "every", every)
    network = at.network
    assert network is not None, "the head is a copy of the network's last layers"
    last = network.stages[-1]
    if why := network.why_unreadable(-1):
        raise UsageError(f"head 'solo' copies layers of the last stage, but {why}. {REMEDY}")
    original = readout(last)
    linear = [layer for layer in original.modules() if isinstance(layer, nn.Linear)] if original is not None else []
    if original is None or linear[-1].in_features != at.shape[-1] or linear[-1].out_features != at.classes:
        raise UsageError(
            f"head 'solo' reads [N, T, d] with the last layers of the model, a norm and a Linear, or a Linear, and "
            f"{at.shapes}; the last stage ends otherwise: use head='language', which every stage trains for itself. "
            f"{REMEDY}"
        )
    return SharedReadout(deferred.deep_copy(original).to(at.features[0].device))


def readout(stage: nn.Module) -> nn.Module | None:
    """The readout at the end of a stage: a norm and a Linear (one module or two layers), or a Linear; else None.

    The layers are the stage's own, not copies.
    """
    layers = list(flattened(stage))
    if len(layers_with_parameters(layers[-1])) == 2 and is_readout(layers_with_parameters(layers[-1])):
        return layers[-1]
    if len(layers) > 1 and is_readout(layers[-2:]):
        return nn.Sequential(*layers[-2:])
    return layers[-1] if isinstance(layers[-1], nn.Linear) else None


def flattened(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested nn.Sequentials, in order; any other module as it is."""
    if isinstance(module, nn.Sequential) and len(module):
        for member in module:
            yield from flattened(member)
    else:
        yield module


def layers_with_parameters(module: nn.Module) -> list[nn.Module]:
    """The submodules that hold parameters themselves."""
    return [layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))]


def is_readout(layers: Sequence[nn.Module]) -> bool:
    """Whether the two layers are a norm and a Linear."""
    return type(layers[0]).__name__.endswith("Norm") and isinstance(layers[1], nn.Linear)


class SharedReadout(ReadingHead):
    """A read-only copy of the last stage's readout."""

    def __init__(self, copied: nn.Module) -> None:
        super().__init__()
        self.readout = copied.requires_grad_(False)

    @property
    def copied(self) -> nn.Module:
        return self.readout

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """The readout of the first tensor, [N, T, d] -> [N, T, V]."""
        output: Tensor = self.readout(x)
        return output

    def newer(self, weight: Tensor, arrived: Tensor) -> Tensor:
        """A copy of the weight that has arrived."""
        return arrived.clone()


def readout_read(stage: nn.Module, last: bool, *, every: int) -> nn.Module | None:
    """The layers of the last stage that `SharedReadout` is a copy of, if it ends in a readout."""
    assert last, "the last stage is the owner of all"
    return readout(stage)


READING = WeightReading(
    lambda stage, num_stages: num_stages - 1, readout_read, "the last stage's readout", of_readout=True
)


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
