"""Communication cost of a step on a process grid Pr x Pc, and the best grid (Gholami et al. 2018). No torch here.

Y = W X, W: d_out x d_in. Pr processes split the weights (the mesh's axis "tensor"), Pc the batch (its axis "data"):
Pr = 1 is data parallelism, Pc = 1 is operator parallelism. Three terms, each a sum over layers: outputs are gathered
over Pr, gradients of inputs summed over Pr (not for the first layer, whose input needs none), gradients of weights
summed over Pc. An all-reduce sends twice as many words as an all-gather. Comparisons of data and operator parallelism
easily leave out this factor 2 of the weight gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, sqrt
from typing import NamedTuple

from stretto.errors import UsageError


class LinearLayer(NamedTuple):
    """Inputs and outputs of a linear layer per example; `weights` if it has not inputs x outputs (convolutions)."""

    inputs: int
    outputs: int
    weights: int = 0

    @property
    def size(self) -> int:
        """The number of weights, |W|."""
        return self.weights or self.inputs * self.outputs


class ProcessGrid(NamedTuple):
    """Pr `rows` of processes split the weights, Pc `columns` split the batch."""

    rows: int
    columns: int


class Volume(NamedTuple):
    """How many messages a process sends one after another, and how many words in all."""

    messages: float
    words: float

    def plus(self, other: "Volume", times: int = 1) -> "Volume":
        """This volume plus `times` the other."""
        return Volume(self.messages + times * other.messages, self.words + times * other.words)


@dataclass(frozen=True)
class Price:
    """The communication of a step: its three terms."""

    outputs: Volume
    input_gradients: Volume
    weight_gradients: Volume

    @property
    def total(self) -> Volume:
        """The sum of the three terms."""
        return self.outputs.plus(self.input_gradients).plus(self.weight_gradients)

    def seconds(self, *, latency: float, seconds_per_word: float) -> float:
        """The time of a step's messages, in seconds: alpha is `latency` (s a message), beta `seconds_per_word`."""
        return self.total.messages * latency + self.total.words * seconds_per_word


def price(grid: ProcessGrid, batch: int, layers: Sequence[LinearLayer]) -> Price:
    """What a step on a batch of B examples sends; each term is a sum over layers i = 1, 2, ...

    outputs: a lg Pr + b (B/Pc) (Pr-1)/Pr d_i; input gradients, i >= 2: 2 (a lg Pr + b (B/Pc) (Pr-1)/Pr d_{i-1});
    weight gradients: 2 (a lg Pc + b (Pc-1)/Pc |W_i|/Pr). Raises UsageError if the batch or a layer has a size below 1.
    """
    check(batch, layers)
    rows, columns = grid
    words_per_feature = batch / columns * (rows - 1) / rows
    outputs = inputs = weights = Volume(0, 0)
    for index, layer in enumerate(layers):
        outputs = outputs.plus(Volume(log2(rows), words_per_feature * layer.outputs))
        if index:
            inputs = inputs.plus(Volume(log2(rows), words_per_feature * layer.inputs), times=2)
        weights = weights.plus(Volume(log2(columns), (columns - 1) / columns * layer.size / rows), times=2)
    return Price(outputs, inputs, weights)


def grids(processes: int) -> list[ProcessGrid]:
    """All grids Pr x Pc of P processes. Raises UsageError if P is below 1."""
    if processes < 1:
        raise UsageError(f"a process grid of {processes} processes: there must be at least 1")
    return [ProcessGrid(rows, processes // rows) for rows in range(1, processes + 1) if processes % rows == 0]


def best_grid(
    processes: int, batch: int, layers: Sequence[LinearLayer], *, latency: float = 0.0, seconds_per_word: float = 1.0
) -> ProcessGrid:
    """The grid whose messages take the least time; by words alone unless `latency` is given. Pc is at most the batch.

    As published, every layer's input needs a gradient except the first layer's.
    """
    fitting = [grid for grid in grids(processes) if grid.columns <= batch]
    return min(
        fitting, key=lambda grid: price(grid, batch, layers).seconds(latency=latency, seconds_per_word=seconds_per_word)
    )


def best_rows(processes: int, batch: int, layer: LinearLayer) -> float:
    """Pr* = sqrt(2 |W| P / (B (d_out + 2 d_in))) of one layer inside a network, by words alone.

    It keeps the factors (Pr-1)/Pr and (Pc-1)/Pc: they only add constants to the sum. The result is not rounded to a
    divisor of P and may lie outside 1 to P.
    """
    check(batch, [layer])
    return sqrt(2 * layer.size * processes / (batch * (layer.outputs + 2 * layer.inputs)))


def check(batch: int, layers: Sequence[LinearLayer]) -> None:
    """Refuse a batch or a layer with sizes below 1."""
    if batch < 1:
        raise UsageError(f"a batch of {batch} examples: there must be at least 1")
    for layer in layers:
        if min(layer.inputs, layer.outputs) < 1 or layer.size < 1:
            raise UsageError(f"{layer}: inputs, outputs and weights must be at least 1")
