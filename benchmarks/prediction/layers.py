"""What the layers of a network cost."""

from collections.abc import Sequence

import torch
from networks import Network
from torch import nn

from stretto.cost import LayerCost, ModelCosts
from stretto.heads import build
from stretto.measure import layer_costs, with_times


def layers_of(net: Network) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for make in net.layers]


def costs_of(net: Network) -> ModelCosts:
    return layer_costs([make() for make in net.layers], net.inputs(2), loss=net.loss, target=net.targets(2))


def heads_of(net: Network, bounds: Sequence[int]) -> list[nn.Module | None]:
    """What methods with losses of their own put behind stages, None behind the last."""
    torch.manual_seed(0)
    x, found = net.inputs(2), []
    with torch.no_grad():
        for make in net.layers:
            x = make()(x)
            found.append(x)
    *inside, last = [found[bound - 1] for bound in bounds[1:]]
    return [*(build("auto", s, (feature,), last) for s, feature in enumerate(inside)), None]


def features(net: Network, layers: list[nn.Module], examples: int, bound: int) -> torch.Tensor:
    """What the layers below a bound give."""
    x = net.inputs(examples)
    with torch.no_grad():
        for layer in layers[:bound]:
            x = layer(x)
    return x


class Gauge:
    """Measures a network's layers, and the heads behind the stages of some methods, for micro-batches of a size."""

    def __init__(self, net: Network, bounds: Sequence[int] | None, examples: int) -> None:
        self.net, self.layers = net, layers_of(net)
        self.costs = costs_of(net)
        self.sizes = [examples // 2, examples]
        self.inputs = [net.inputs(n) for n in self.sizes]
        self.targets = [net.targets(n) for n in self.sizes]
        self.heads = []
        for stage, head in enumerate(heads_of(net, bounds)[:-1] if bounds else []):
            given = [features(net, self.layers, n, bounds[stage + 1]) for n in (2, *self.sizes)]
            behind = [nn.Identity(), head]
            costs = layer_costs(behind, given[0], loss=net.loss, target=net.targets(2))
            self.heads.append((costs, behind, given[1:]))

    def measure(self) -> tuple[ModelCosts, list[LayerCost]]:
        """Costs with times, of all layers and of heads."""
        timed = self.timed(self.costs, self.layers, self.inputs)
        heads = [self.timed(costs, behind, given).layers for costs, behind, given in self.heads]
        return timed, [head.then(loss) for _, head, loss in heads]

    def timed(self, costs: ModelCosts, layers: list[nn.Module], examples: list[torch.Tensor]) -> ModelCosts:
        """The costs with times, while the other process of the pair measures the same."""
        return with_times(
            costs, layers, examples, loss=self.net.loss, targets=self.targets, optimizer=self.net.step, repeats=1,
            crowded=True,
        )  # fmt: skip
