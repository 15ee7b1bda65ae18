"""The seconds of layers as one stage: a table has at [i, j] the value of the layers [i, j). No torch here.

A stage that is given has one cell, of tables of its own layers. The host issues the kernels of an action one after the
other and does not wait for them; the device runs them in this order, each once it has been issued. With d seconds of
the device and h of the host for each layer, the device is done after

    max over k of  h_1 + ... + h_k + d_(k+1) + ... + d_n     k from 0 to n

seconds if nothing was under way before: kernels of one layer are taken to be alike. That is the longer one of the two
sums at least. What it is longer than the device's sum is a stage's lag. With e_k the sum of h - d over the layers below
k, a forward of [i, j) waits for

    max over k from i to j of  e_k - e_i                and a backward    e_j - min over k from i to j of  e_k

So an action whose layers keep the device busy for longer than its host takes no longer than without one.

Where a stage is the whole network its backward follows its forward, and the host comes to it with as much time in hand
as the device was behind. In a pipeline an action waits for its message, and so does the host: Megatron-LM synchronises
at each (megatron/p2p_communication.py), and so do processes of `train`. A step begins with nothing under way, since
programs read a loss or a norm once a step. Lin et al. 2022 (arXiv 2201.07821) walk through hosts and kernels alike.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]  # one of each layer
Table = NDArray[np.float64]
Seconds = TypeVar("Seconds", float, NDArray[np.float64])  # of one stage, or an array


class LayerTimes(NamedTuple, Generic[Seconds]):
    """Seconds of a layer's actions on a micro-batch; a stage's are as in `stage_sums`.

    `accumulate` is the extra time of a backward that adds its gradients to another micro-batch's.
    """

    forward: Seconds
    backward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    update: Seconds
    accumulate: Seconds


Times = LayerTimes[Table]  # of the layers [i, j) as one stage, at [i, j]; per micro-batch, `update` per turn


class LayerParts(NamedTuple):
    """Seconds of a layer's actions on the device, and of the host that starts its kernels."""

    device: LayerTimes[float]
    host: LayerTimes[float]

    @property
    def alone(self) -> LayerTimes[float]:
        """Seconds of the layer where it is a stage of its own."""
        return LayerTimes(*map(max, self.device, self.host))


def running_sums(values: Numbers) -> Numbers:
    """The sum of the values before i, at i."""
    return np.concatenate([[0.0], np.cumsum(values)])


def range_sums(values: Numbers) -> Table:
    """The sum of the values [i, j), at [i, j]."""
    sums = running_sums(values)
    table: Table = sums[None, :] - sums[:, None]
    return table


def range_max(values: Numbers) -> Table:
    """The largest of the values [i, j), at [i, j]."""
    layers = len(values)
    table = np.zeros((layers + 1, layers + 1))
    for i in range(layers):
        table[i, i + 1 :] = np.maximum.accumulate(values[i:])
    return table


def stage_sums(layers: LayerTimes[Numbers]) -> Times:
    """The device's seconds of the layers [i, j) as one stage, by those of single layers.

    W is a whole backward above the lowest layer that has a weight gradient.
    """
    sums = [range_sums(column) for column in layers]
    return LayerTimes(*sums)._replace(weight_gradient=weight_gradients_of(layers.weight_gradient, layers.backward))


def weight_gradients_of(weights: Numbers, backward: Numbers) -> Table:
    """W of [i, j): the weight gradient of its lowest layer that has one, and whole backwards of the layers above."""
    layers, lowest = len(weights), lowest_trained(weights)
    sums = running_sums(backward)
    begin = np.append(weights, 0.0)[lowest]
    above = sums[None, :] - sums[np.minimum(lowest + 1, layers)][:, None]
    columns = np.arange(layers + 1)
    table: Table = np.where(lowest[:, None] < columns[None, :], begin[:, None] + above, 0.0)
    return table


def lowest_trained(weights: Numbers) -> NDArray[np.intp]:
    """For each layer, and the end, the lowest one from it on with a weight gradient; the end if there is none."""
    layers = len(weights)
    trained = np.append(np.where(weights > 0, np.arange(layers), layers), layers)
    lowest: NDArray[np.intp] = np.minimum.accumulate(trained[::-1])[::-1]
    return lowest


def with_starts(times: LayerTimes[Seconds], start: float, step: float) -> LayerTimes[Seconds]:
    """Times with `start` seconds added to every backward and `step` to every update, unless they take none."""

    def plus(seconds: Seconds, more: float) -> Seconds:
        longer: Seconds = np.where(seconds > 0, seconds + more, seconds)  # type: ignore[assignment]
        return longer

    return times._replace(
        backward=plus(times.backward, start),
        input_gradient=plus(times.input_gradient, start),
        weight_gradient=plus(times.weight_gradient, start),
        update=plus(times.update, step),
    )


def with_head(stage: LayerTimes[Seconds], head: LayerTimes[Seconds]) -> LayerTimes[Seconds]:
    """A stage with a head behind it; the head's whole backward is part of the stage's B and I."""
    return LayerTimes(
        forward=stage.forward + head.forward,
        backward=stage.backward + head.backward,
        input_gradient=stage.input_gradient + head.backward,
        weight_gradient=stage.weight_gradient,
        update=stage.update + head.update,
        accumulate=stage.accumulate + head.accumulate,
    )


def learn_seconds(predictor: LayerTimes[Seconds], *, keeps_graph: bool) -> Seconds:
    """Seconds of L, learning to predict a gradient: W of the predicting module and its update.

    A backward has the forward that predicts; where other learning steps came between, L runs it once more.
    """
    again = predictor.forward * (not keeps_graph)
    return predictor.weight_gradient + predictor.update + again


class HostLags(NamedTuple):
    """Seconds that a stage of the layers [i, j) waits for its host, at [i, j], in each action on a micro-batch.

    `issuing` are the host's own seconds of a forward, `stepping` of an update.
    """

    forward: Table
    backward: Table
    input_gradient: Table
    weight_gradient: Table
    issuing: Table
    stepping: Table


def host_lags(device: LayerTimes[Numbers], host: LayerTimes[Numbers]) -> HostLags | None:
    """The lags of a host behind which a device waits, from seconds of single layers; None without a host."""
    if not any(column.any() for column in host):
        return None
    backward = backward_lags(device.backward, host.backward)
    return HostLags(
        forward_lags(device.forward, host.forward),
        backward,
        backward_lags(device.input_gradient, host.input_gradient),
        weight_lags(device, host, backward),
        range_sums(host.forward),
        range_sums(host.update),
    )


def forward_lags(device: Numbers, host: Numbers) -> Table:
    """The lags of layers that run in their order."""
    ahead = running_sums(host - device)
    if (host <= device).all():
        return np.zeros((len(ahead),) * 2)
    until = np.where(np.triu(np.ones((len(ahead),) * 2, dtype=bool)), ahead[None, :], -np.inf)
    lags: Table = np.maximum(0.0, np.maximum.accumulate(until, axis=1) - ahead[:, None])
    return lags


def backward_lags(device: Numbers, host: Numbers) -> Table:
    """The lags of layers that run in the opposite order."""
    return forward_lags(device[::-1], host[::-1])[::-1, ::-1].T.copy()


def weight_lags(device: LayerTimes[Numbers], host: LayerTimes[Numbers], backward: Table) -> Table:
    """The lags of whole backwards above the lowest layer with a weight gradient, and of that one's."""
    lowest, layers = lowest_trained(device.weight_gradient), len(device.forward)
    ahead = running_sums(host.backward - device.backward)
    own = np.append(host.weight_gradient - device.weight_gradient, 0.0)[lowest]
    above = np.minimum(lowest + 1, layers)
    last = ahead[None, :] - ahead[above][:, None] + own[:, None]
    columns = np.arange(layers + 1)
    lags: Table = np.where(lowest[:, None] < columns[None, :], np.maximum(backward[above], last), 0.0)
    return np.maximum(0.0, lags)


def stage_of(parts: Sequence[LayerParts], *, is_whole: bool, start: float, step: float) -> LayerTimes[float]:
    """The seconds of a stage of these layers, with what it waits for its host; `is_whole` if they are the network.

    `start` and `step` are as in `with_starts`.
    """
    device, host = (LayerTimes(*columns) for columns in np.array(parts).transpose(1, 2, 0))
    times, lags = LayerTimes(*(float(table[0, -1]) for table in stage_sums(device))), host_lags(device, host)
    if lags is not None:
        forward, backward, inputs, weights, issuing, stepping = (float(table[0, -1]) for table in lags)
        in_hand = times.forward + forward - issuing if is_whole else 0.0
        times = LayerTimes(
            forward=times.forward + forward,
            backward=times.backward + max(0.0, backward - in_hand),
            input_gradient=times.input_gradient + max(0.0, inputs - in_hand),
            weight_gradient=times.weight_gradient + max(0.0, weights - in_hand),
            update=max(times.update, stepping),
            accumulate=times.accumulate,
        )
    return LayerTimes(*map(float, with_starts(times, start, step)))
