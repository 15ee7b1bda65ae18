"""SegProp (openreview.net/forum?id=p5ObETPuTi): every local loss passes through the network's own last layers.

Of the paper only the abstract could be retrieved: the last layers and the task's head stay on the path of the loss, and
are trained with whichever segment is. There one segment is trained at a time. Ours: all blocks are trained at once, so
that the last layers learn from the sum of all blocks' losses.

The last layers are shared, not copied: the last stage that has a parameter owns it, and its optimizer alone steps it.
With S stages, the head behind stage s computes for micro-batch m with the owner's version after the update that
contains micro-batch m - (o - s + 1), where o is the owner, as `solo` does; under `overlapping(delay=1)` one update
older. Its gradient travels up, beside the activations, and is added to the owner's before its update with m. So nobody
waits, and placement does not change the results. A weight that the last layers share with the embedding is owned by the
last stage, too, and stage 0 borrows it in the same way.

A stage's head has the last layers that stand above the stage. An adapter precedes them where the stage's output has
another shape than what they take; the stage trains it. Norms' running statistics are each head's own.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from stretto.errors import UsageError
from stretto.heads.auglocal import Copies, adapters_between
from stretto.heads.head import REMEDY, Network, Site, Tensors
from stretto.heads.man import has_parameters
from stretto.heads.solo import flattened, readout
from stretto.nn.batch import as_tuple
from stretto.nn.deferred import RemoteStage
from stretto.nn.preserve import device_of, undisturbed
from stretto.options.named import whole


def segprop(at: Site, *, layers: int = 1) -> nn.Module:
    """The network's own last `layers` layers and its output layer, as far as they stand above the stage.

    Raises UsageError if the network has fewer layers above stage 0, if several processes share a stage, if one of the
    stages lives in another process, or if nothing leads from the stage's output to what the layers take.
    """
    whole("head 'segprop'", "layers", layers)
    network = at.network
    assert network is not None, "the head is made of the network's last layers"
    if network.shared:
        raise UsageError(f"head 'segprop' shares layers, but several processes share a stage's weights. {REMEDY}")
    top = network.once((top_layers, layers), lambda: top_layers(network.stages, layers))
    above = [(stage, layer) for stage, layer in top if stage > at.stage]
    adapted = adapters_between(at.features, inputs_of(network, above[0]), at.stage, above[0][0], head="segprop")
    device, dtype = at.features[0].device, at.features[0].dtype
    return SharedTop([adapted.to(device, dtype), *(sharing_copy(layer).to(device) for _, layer in above)])


class SharedTop(Copies):
    """An adapter, then the network's last layers, with their own parameters."""

    @property
    def shared(self) -> Iterator[nn.Parameter]:
        for layer in self.layers[1:]:
            yield from layer.parameters()


def top_layers(stages: Sequence[nn.Module], layers: int) -> list[tuple[int, nn.Module]]:
    """The last `layers` layers with parameters before the output layer, and all behind them, each with its stage.

    The output layer is a norm and a Linear, or else the last layer that has parameters. Raises UsageError if there are
    not so many above stage 0's first layer, or a stage lives in another process.
    """
    if any(isinstance(stage, RemoteStage) for stage in stages):
        raise UsageError(
            "share_top (head 'segprop') shares layers of later stages, but some were given as functions, and live in "
            f"other processes: give stages as modules. {REMEDY}"
        )
    placed = [(index, layer) for index, stage in enumerate(stages) for layer in flattened(stage)]
    with_parameters = [n for n, (_, layer) in enumerate(placed) if has_parameters(layer)]
    end = readout(stages[-1])
    of_output = sum(map(has_parameters, end)) if type(end) is nn.Sequential else 1
    start = len(with_parameters) - of_output - layers
    if start < 1:
        between = max(0, len(with_parameters) - of_output - 1)
        remedy = "share fewer"
        if not all(isinstance(stage, nn.Sequential) for stage in stages):
            remedy = (
                "a stage of a model that was traced is one layer: use head='language' or 'linear', which every stage "
                "trains for itself, or give stages as lists of layers"
            )
        raise UsageError(
            f"share_top={layers} (head 'segprop(layers={layers})'): the network has {between} layers between its first "
            f"layer and its output layer; {remedy}"
        )
    return placed[with_parameters[start] :]


def inputs_of(network: Network, first: tuple[int, nn.Module]) -> Tensors:
    """The tensors that a layer of a stage takes, for the network's batch."""
    stage, layer = first
    values = network.outputs[stage - 1] if stage else network.inputs
    before: list[nn.Module] = []
    for other in flattened(network.stages[stage]):
        if other is layer:
            break
        before.append(other)
    device = device_of(before) if before else values[0].device
    values = tuple(value.to(device, copy=bool(before)) for value in values)  # a layer may change them in place
    with undisturbed(before, device), torch.no_grad():
        for other in before:
            values = as_tuple(other(*values))
    return values


def sharing_copy(layer: nn.Module) -> nn.Module:
    """A copy of a layer that has the same parameters, and buffers of its own."""
    return copy.deepcopy(layer, {id(parameter): parameter for parameter in layer.parameters()})


def shared_by(stages: Sequence[nn.Module], reading: Sequence[int], *, layers: int) -> dict[int, list[nn.Parameter]]:
    """The parameters that the head behind each of the `reading` stages borrows, each once."""
    top = top_layers(stages, layers)
    return {
        index: list(dict.fromkeys(p for stage, layer in top if stage > index for p in layer.parameters()))
        for index in reading
    }
