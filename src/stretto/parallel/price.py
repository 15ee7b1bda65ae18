"""What a step's messages cost on a process grid Pr x Pc, and which grid is best (Gholami et al. 2018). No torch here.

Y = W X, W: d_out x d_in. Pr processes split the weights (the mesh's axis "tensor"), Pc the batch (its axis "data"):
Pr = 1 is data parallelism, Pc = 1 is operator parallelism. Three terms, each a sum over layers: outputs are gathered
over Pr, gradients of inputs summed over Pr (not for the first layer, whose input needs none), gradients of weights
summed over Pc. All-reduces send twice what a gather does: where data and operator parallelism are compared, the 2 of
weight gradients is easily left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, sqrt
from typing import NamedTuple

from stretto.errors import UsageError


class LinearLayer(NamedTuple):
    """A linear layer's inputs and outputs an example; `weights` where they are not inputs x outputs (convolutions)."""

    inputs: int
    outputs: int
    weights: int = 0

    @property
    def size(self) -> int:
        """The number of weights, |W|."""
        return self.weights or self.inputs * self.outputs


class ProcessGrid(NamedTuple):
    """Pr processes for the weights, Pc for the batch."""

    rows: int
    columns: int


class Volume(NamedTuple):
    """A process's messages that follow one another, and the words it sends."""

    messages: float
    words: float

    def plus(self, other: "Volume", times: int = 1) -> "Volume":
        """Both, the other so many times."""
        return Volume(self.messages + times * other.messages, self.words + times * other.words)


@dataclass(frozen=True)
class Price:
    """The three terms of a step."""

    outputs: Volume
    input_gradients: Volume
    weight_gradients: Volume

    @property
    def total(self) -> Volume:
        """The sum of the three terms."""
        return self.outputs.plus(self.input_gradients).plus(self.weight_gradients)

    def seconds(self, *, latency: float, seconds_per_word: float) -> float:
        """alpha and beta of the links."""
        return self.total.messages * latency + self.total.words * seconds_per_word


def price(grid: ProcessGrid, batch: int, layers: Sequence[LinearLayer]) -> Price:
    """The sums over layers i = 1, 2, ... of a batch of B examples.

    outputs: a lg Pr + b (B/Pc) (Pr-1)/Pr d_i; input gradients, i >= 2: 2 (a lg Pr + b (B/Pc) (Pr-1)/Pr d_{i-1});
    weight gradients: 2 (a lg Pc + b (Pc-1)/Pc |W_i|/Pr).
    """
    check(batch, layers)
    rows, columns = grid
    share = batch / columns * (rows - 1) / rows
    outputs = inputs = weights = Volume(0, 0)
    for index, layer in enumerate(layers):
        outputs = outputs.plus(Volume(log2(rows), share * layer.outputs))
        if index:
            inputs = inputs.plus(Volume(log2(rows), share * layer.inputs), times=2)
        weights = weights.plus(Volume(log2(columns), (columns - 1) / columns * layer.size / rows), times=2)
    return Price(outputs, inputs, weights)


def grids(processes: int) -> list[ProcessGrid]:
    """All ways to write P as Pr x Pc."""
    if processes < 1:
        raise UsageError(f"a process grid of {processes} processes: there must be at least 1")
    return [ProcessGrid(rows, processes // rows) for rows in range(1, processes + 1) if processes % rows == 0]


def best_grid(
    processes: int, batch: int, layers: Sequence[LinearLayer], *, latency: float = 0.0, seconds_per_word: float = 1.0
) -> ProcessGrid:
    """The cheapest of them; by words sent alone, unless told what a message takes. Pc is at most the batch.

    As published each layer's input needs a gradient but the first one's.
    """
    fitting = [grid for grid in grids(processes) if grid.columns <= batch]
    return min(
        fitting,
        key=lambda grid: price(grid, batch, layers).seconds(latency=latency, seconds_per_word=seconds_per_word),
    )


def best_rows(processes: int, batch: int, layer: LinearLayer) -> float:
    """Pr* = sqrt(2 |W| P / (B (d_out + 2 d_in))) of one layer inside a network, by words alone.

    Where (Pr-1)/Pr and (Pc-1)/Pc are taken as they are: their parts that fall with Pr are constants of the sum. Not
    rounded to a divisor of P, and not kept within 1 and P.
    """
    check(batch, [layer])
    return sqrt(2 * layer.size * processes / (batch * (layer.outputs + 2 * layer.inputs)))


def check(batch: int, layers: Sequence[LinearLayer]) -> None:
    """Refuse what has no price."""
    if batch < 1:
        raise UsageError(f"a batch of {batch} examples: there must be at least 1")
    for layer in layers:
        if min(layer.inputs, layer.outputs) < 1 or layer.size < 1:
            raise UsageError(f"{layer}: inputs, outputs and weights must be at least 1")
