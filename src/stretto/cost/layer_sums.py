"""The seconds of layers, and of several as one stage, on a device and on the host that starts its kernels.

The host issues the kernels of an action one after the other and does not wait for them; the device runs them in this
order, each once it has been issued. With d seconds of the device and h of the host for each layer, the device is done
after

    max over k of  h_1 + ... + h_k + d_(k+1) + ... + d_n     k from 0 to n

seconds if nothing was under way before: kernels of one layer are taken to be alike. That is the longer one of the two
sums at least. What it is longer than the device's sum is a stage's lag, max over k of (h - d) summed up to k, or 0. So
an action whose layers keep the device busy for longer than its host takes no longer than without one.

Where a stage is the whole network its backward follows its forward, and the host comes to it with as much time in hand
as the device was behind. In a pipeline an action waits for its message, and so does the host: Megatron-LM synchronises
at each (megatron/p2p_communication.py), and so do processes of `train`. A step begins with nothing under way, since
programs read a loss or a norm once a step. Lin et al. 2022 (arXiv 2201.07821) walk through hosts and kernels alike.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Seconds = TypeVar("Seconds", float, "NDArray[np.float64]")  # of one stage, or an array


class LayerTimes(NamedTuple, Generic[Seconds]):
    """Seconds of a layer's actions on a micro-batch. A stage's are the sums over its layers, but for W: see `summed`.

    `accumulate` is the extra time of a backward that adds its gradients to another micro-batch's.
    """

    forward: Seconds
    backward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    update: Seconds
    accumulate: Seconds


class LayerParts(NamedTuple):
    """Seconds of a layer's actions on the device, and of the host that starts its kernels."""

    device: LayerTimes[float]
    host: LayerTimes[float]

    @property
    def alone(self) -> LayerTimes[float]:
        """Seconds of the layer where it is a stage of its own."""
        return LayerTimes(*map(max, self.device, self.host))


def summed(layers: Sequence[LayerTimes[float]]) -> LayerTimes[float]:
    """The seconds of a stage of these layers; W is a whole backward above its lowest layer with a weight gradient."""
    total = LayerTimes(*(sum(column) for column in zip(*layers, strict=True)))
    lowest = lowest_trained(layers)
    if lowest is None:
        return total
    weights = layers[lowest].weight_gradient + sum(layer.backward for layer in layers[lowest + 1 :])
    return total._replace(weight_gradient=weights)


def lowest_trained(layers: Sequence[LayerTimes[float]]) -> int | None:
    """The lowest layer with a weight gradient."""
    return next((index for index, layer in enumerate(layers) if layer.weight_gradient), None)


def stage_of(parts: Sequence[LayerParts], *, is_whole: bool = False, waits: bool = True) -> LayerTimes[float]:
    """The seconds of a stage of these layers; `is_whole` if they are all of the network.

    Without `waits` those of the device alone, which does not wait for its host but in an update.
    """
    devices = [part.device for part in parts]
    times = summed(devices)
    times = times._replace(update=max(times.update, sum(part.host.update for part in parts)))
    if not waits or not any(map(any, (part.host for part in parts))):
        return times
    down, lowest = parts[::-1], lowest_trained(devices)
    trained = [] if lowest is None else parts[lowest:]
    weights = [(part.device.backward, part.host.backward) for part in trained]
    weights[:1] = [(part.device.weight_gradient, part.host.weight_gradient) for part in trained[:1]]
    forward = lag((part.device.forward, part.host.forward) for part in parts)
    in_hand = times.forward + forward - sum(part.host.forward for part in parts) if is_whole else 0.0
    backward, inputs, trains = (
        max(0.0, lag(layers) - in_hand)
        for layers in (
            ((part.device.backward, part.host.backward) for part in down),
            ((part.device.input_gradient, part.host.input_gradient) for part in down),
            reversed(weights),
        )
    )
    return times._replace(
        forward=times.forward + forward,
        backward=times.backward + backward,
        input_gradient=times.input_gradient + inputs,
        weight_gradient=times.weight_gradient + trains,
    )


def lag(layers: Iterable[tuple[float, float]]) -> float:
    """How long a device waits for its host in an action of these layers, in the order in which they run: (d, h)."""
    longest = ahead = 0.0
    for device, host in layers:
        ahead += host - device
        longest = max(longest, ahead)
    return longest


def with_starts(times: LayerTimes[float], start: float, step: float = 0.0) -> LayerTimes[float]:
    """Times with `start` seconds added to every backward and `step` to every update, unless they take none."""
    added = {"backward": start, "input_gradient": start, "weight_gradient": start, "update": step}
    begun = {kind: seconds for kind, seconds in added.items() if getattr(times, kind)}
    return times._replace(**{kind: getattr(times, kind) + seconds for kind, seconds in begun.items()})


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
