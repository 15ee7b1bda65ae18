"""How long devices wait for their hosts, for every way to cut layers: `cost/layer_sums.py` over ranges.

With e_k the host's seconds less the device's, summed over the layers below k, a forward of [i, j) waits for

    max over k from i to j of  e_k - e_i                and a backward    e_j - min over k from i to j of  e_k
"""

from typing import NamedTuple

import numpy as np

from stretto.cost.layer_sums import LayerTimes
from stretto.plan.places import Numbers
from stretto.plan.range_tables import Table, range_sums, running_sums

Row = LayerTimes[Numbers]


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


def host_lags(device: Row, host: Row) -> HostLags | None:
    """The lags of a host behind which a device waits, from seconds of single layers; None without a host."""
    if not any(column.any() for column in host):
        return None
    lowest = np.append(lowest_trained(device.weight_gradient), len(device.forward))
    backward = backward_lags(device.backward, host.backward)
    weights = weight_lags(device, host, backward, lowest)
    inputs = backward_lags(device.input_gradient, host.input_gradient)
    backward[0], inputs[0] = weights[0], 0.0  # stage 0 computes no gradient of its input
    return HostLags(
        forward_lags(device.forward, host.forward), backward, inputs, weights,
        range_sums(host.forward), range_sums(host.update),
    )  # fmt: skip


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


def weight_lags(device: Row, host: Row, backward: Table, lowest: Numbers) -> Table:
    """The lags of whole backwards above the lowest layer with a weight gradient, and of that one's."""
    ahead, layers = running_sums(host.backward - device.backward), len(device.forward)
    own = np.append(host.weight_gradient - device.weight_gradient, 0.0)[lowest]
    above = np.minimum(lowest + 1, layers)
    last = ahead[None, :] - ahead[above][:, None] + own[:, None]
    columns = np.arange(layers + 1)
    lags: Table = np.where(lowest[:, None] < columns[None, :], np.maximum(backward[above], last), 0.0)
    return np.maximum(0.0, lags)


def lowest_trained(weights: Numbers) -> Numbers:
    """For each layer the lowest one from it on with a weight gradient; their number if there is none."""
    layers = len(weights)
    found = np.where(weights > 0, np.arange(layers), layers)
    lowest: Numbers = np.minimum.accumulate(found[::-1])[::-1]
    return lowest
