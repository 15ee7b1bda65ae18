"""A readout that all stages of a language model share (the idea of SOLO, arXiv 2609.35440).

A head is a copy of the model's own norm and unembedding, which nothing trains but the last stage's loss. The paper's
text could not be retrieved, so how copies are kept fresh is ours: after an update of the last stage its readout
travels, like tied weights, to the stages below. The forward of micro-batch m on stage s, of S, reads the version that
contains micro-batch m - (S - s), and no later one; with `every`, the newest of each `every`-th update up to it. So no
stage waits for it where each has a worker, and placement changes nothing.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import REMEDY, Site
from stretto.nn.remote_stage import RemoteStage
from stretto.options.named import whole
from stretto.options.parse import parse
from stretto.schedule import Reach

NAME = "solo"


def solo(at: Site, *, every: int = 1) -> nn.Module:
    """A copy of the model's readout, refreshed after every so many updates. Raises UsageError where there is none."""
    whole("head 'solo'", "every", every)
    network = at.network
    assert network is not None, "the head is a copy of the network's last layers"
    last = network.stages[-1]
    if network.shared or isinstance(last, RemoteStage):
        why = (
            "several processes share its weights or images"
            if network.shared
            else "it was given as a function, and lives in another process: give stages as modules"
        )
        raise UsageError(f"head 'solo' copies layers of the last stage, but {why}. {REMEDY}")
    found = readout(last)
    linear = [layer for layer in found.modules() if isinstance(layer, nn.Linear)] if found is not None else []
    if found is None or linear[-1].in_features != at.shape[-1] or linear[-1].out_features != at.classes:
        raise UsageError(
            f"head 'solo' reads [N, T, d] with the last layers of the model, a norm and a Linear, or a Linear, and "
            f"{at.shapes}; the last stage ends otherwise: use head='language', which every stage trains for itself. "
            f"{REMEDY}"
        )
    return SharedReadout(copy.deepcopy(found).to(at.features[0].device))


def readout(stage: nn.Module) -> nn.Module | None:
    """The end of a stage: its last layer if that is a Linear or a module of a norm and one, else both; None for others.

    The module's own layers, not copies.
    """
    layers = list(flat(stage))
    if len(own_layers(layers[-1])) == 2 and is_readout(own_layers(layers[-1])):
        return layers[-1]
    if len(layers) > 1 and is_readout(layers[-2:]):
        return nn.Sequential(*layers[-2:])
    return layers[-1] if isinstance(layers[-1], nn.Linear) else None


def flat(module: nn.Module) -> Iterator[nn.Module]:
    """The members of sequences, and of sequences in them."""
    if isinstance(module, nn.Sequential) and len(module):
        for member in module:
            yield from flat(member)
    else:
        yield module


def own_layers(module: nn.Module) -> list[nn.Module]:
    """What has parameters in a module."""
    return [each for each in module.modules() if any(True for _ in each.parameters(recurse=False))]


def is_readout(layers: Sequence[nn.Module]) -> bool:
    """Whether these are a norm and a Linear."""
    return type(layers[0]).__name__.endswith("Norm") and isinstance(layers[1], nn.Linear)


class SharedReadout(nn.Module):
    """A read-only copy of the last stage's readout."""

    def __init__(self, copied: nn.Module) -> None:
        super().__init__()
        self.readout = copied.requires_grad_(False)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        """[N, T, d] -> [N, T, V]."""
        output: Tensor = self.readout(x)
        return output

    def receive(self, arrived: Iterable[Mapping[int, Tensor]]) -> None:
        """Take over newer values. New parameters: a forward in flight keeps those that it saw."""
        for values in arrived:
            numbers = iter(range(len(values)))
            for layer in self.readout.modules():
                for name in layer._parameters:
                    if layer._parameters[name] is not None:
                        value = values[next(numbers)]
                        layer._parameters[name] = nn.Parameter(value.detach().clone(), requires_grad=False)


def lent(stage: nn.Module) -> dict[int, nn.Parameter]:
    """What the last stage lends, in the order in which `receive` takes it."""
    found = readout(stage)
    assert found is not None, "a head was built of it"
    return dict(enumerate(p for layer in found.modules() for p in layer._parameters.values() if p is not None))


def readings(head: str, reach: Reach, given: Sequence[nn.Module | None] | None) -> tuple[tuple[int, int, int], ...]:
    """Who reads whose weights after how many updates, (owner, reader, every), with this head for those not given."""
    bare, options = parse(head, "head")
    if bare != NAME:
        return ()
    owner, every = reach.num_stages - 1, options.get("every", 1)
    whole("head 'solo'", "every", every)
    left = [stage for stage in reach.heads[:-1] if given is None or stage >= len(given) or given[stage] is None]
    return tuple((owner, stage, every) for stage in left)
