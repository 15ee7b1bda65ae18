"""InfoPro (Wang et al. 2021, arXiv 2101.10832): a stage also learns to keep information about the model's input.

The loss is `lambda_1 (reconstruction error of the input) + lambda_2 (the task's loss)`, both computed from the stage's
output alone. In the authors' code (github.com/blackfeather-wang/InfoPro-Pytorch) both weights change linearly with the
local module's number, from a first to a last value. Ours: lambda_2 is 1, and the classifier has two layers. The decoder
of an image is theirs without BatchNorm and sigmoid: interpolation, then two 3x3 convolutions with 12 channels between.
Its loss is the squared error, as inputs here are normalised and not between 0 and 1. Tokens, which the paper has not,
are reconstructed by a norm and a Linear with the cross entropy; their vocabulary is the one that the model predicts.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss

from stretto.errors import UsageError
from stretto.heads.head import REMEDY, LocalLoss, Site, Tensors, decline
from stretto.heads.plain import language, two_layer

CHANNELS = 12


def infopro(at: Site, *, first: float = 1.0, last: float = 0.0) -> nn.Module:
    """An `InfoPro` head whose lambda_1 is `first` behind the first stage and `last` behind the last stage but one.

    Raises UsageError if the model's input is neither floating-point nor tokens of a language model, or each process
    holds a part of it only.
    """
    for name, value in (("first", first), ("last", last)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"head 'infopro': {name}={value!r} must be a number of at least 0")
    network = at.network
    assert network is not None, "the head reconstructs the network's input"
    inputs = network.inputs[0]
    if network.shared:
        raise UsageError(
            "head 'infopro' reconstructs whole inputs, but several processes share a stage's weights or images: use "
            f"tensor=1 and space=(1, 1), or another head. {REMEDY}"
        )
    weight = weight_at(at.stage, len(network.stages), first, last)
    if inputs.is_floating_point():
        return InfoPro(two_layer(at), decoder(at.shape, inputs.shape), weight)
    if at.output.dim() != 3 or inputs.shape != at.shape[:2]:
        raise UsageError(
            f"head 'infopro' reconstructs the model's input, but that is {inputs.dtype} of the shape "
            f"{list(inputs.shape)}, and {at.shapes}: of whole numbers it is for tokens [N, T] of a language model, "
            "[N, T, d] -> [N, T, V]; take head='sequence' or 'two-layer'"
        )
    return InfoPro(two_layer(at), language(at), weight)


def weight_at(stage: int, num_stages: int, first: float, last: float) -> float:
    """lambda_1 behind a stage."""
    share = decline(stage, num_stages)
    return first * (1 - share) + last * share


class InfoPro(LocalLoss):
    """A classifier, and a decoder whose error is added to the loss, times `weight`."""

    def __init__(self, classifier: nn.Module, decoder: nn.Module, weight: float) -> None:
        super().__init__()
        self.classifier = classifier
        self.decoder = decoder
        self.weight = weight

    def forward(self, *features: Tensor) -> Tensor:
        """The classifier's output for the features of a stage."""
        output: Tensor = self.classifier(features[0])
        return output

    def total(self, loss: Tensor, features: Tensors, inputs: Tensors) -> Tensor:
        """The loss plus `weight` times the decoder's error; with weight 0 the decoder does not run.

        The error is the squared one, or for tokens the mean cross entropy of the token at each position.
        """
        if not self.weight:
            return loss
        decoded, wanted = self.decoder(features[0]).to(loss.dtype), inputs[0]
        if wanted.is_floating_point():
            return loss + self.weight * mse_loss(decoded, wanted.to(loss.dtype))
        return loss + self.weight * cross_entropy(decoded.flatten(0, 1), wanted.flatten())

    def extra_repr(self) -> str:
        return f"weight={self.weight:g}"


class Enlarged(nn.Module):
    """[N, C, H, W] -> [N, C, *size], bilinear."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self.size = tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        return interpolate(x, size=self.size, mode="bilinear", align_corners=True)


def decoder(features: Sequence[int], inputs: Sequence[int]) -> nn.Module:
    """A decoder from a stage's output to the model's input: convolutions for images, else two linear layers."""
    if len(features) == len(inputs) == 4:
        return nn.Sequential(
            Enlarged(inputs[2:]),
            nn.Conv2d(features[1], CHANNELS, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(CHANNELS, inputs[1], 3, padding=1),
        )
    width, size = math.prod(features[1:]), math.prod(inputs[1:])
    hidden = min(width, size)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, size), nn.Unflatten(1, tuple(inputs[1:]))
    )
