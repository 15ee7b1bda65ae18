"""InfoPro (Wang et al. 2021, arXiv 2101.10832): a stage also learns to keep what the model's input can be told from.

The loss is `lambda_1 (reconstruction of the input) + lambda_2 (the task's loss)`, both
from the stage's output alone. In the authors' code (github.com/blackfeather-wang/InfoPro-Pytorch) both weights go
linearly from a first to a last value with the local module's number. Ours: lambda_2 is 1; the classifier has two
layers; the decoder of an image is their interpolation and two 3x3 convolutions of 12 channels between, but for
BatchNorm and the sigmoid, and its loss a squared error, as inputs here are normalised rather than between 0 and 1.
"""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from stretto.errors import UsageError
from stretto.heads.head import REMEDY, LocalLoss, Site, Tensors, decline
from stretto.heads.plain import two_layer

CHANNELS = 12


def infopro(at: Site, *, first: float = 1.0, last: float = 0.0) -> nn.Module:
    """lambda_1 is `first` behind the first stage and `last` behind the last but one."""
    for name, value in (("first", first), ("last", last)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise UsageError(f"head 'infopro': {name}={value!r} must be a number of at least 0")
    network = at.network
    assert network is not None, "the head reconstructs the network's input"
    wanted = network.inputs[0]
    if network.shared:
        raise UsageError(
            "head 'infopro' reconstructs whole inputs, but several processes share a stage's weights or images: use "
            f"tensor=1 and space=(1, 1), or another head. {REMEDY}"
        )
    if not wanted.is_floating_point():
        raise UsageError(
            f"head 'infopro' reconstructs the model's input, but that is {wanted.dtype}: it is for images and vectors, "
            "not for tokens; take head='language' or 'two-layer'"
        )
    share = decline(at.stage, len(network.stages))
    return InfoPro(two_layer(at), decoder(at.shape, wanted.shape), first * (1 - share) + last * share)


class InfoPro(LocalLoss):
    """A classifier, and a decoder whose squared error counts `weight` times."""

    def __init__(self, classifier: nn.Module, decoder: nn.Module, weight: float) -> None:
        super().__init__()
        self.classifier = classifier
        self.decoder = decoder
        self.weight = weight

    def forward(self, *features: Tensor) -> Tensor:
        """The model's kind of output."""
        output: Tensor = self.classifier(features[0])
        return output

    def total(self, loss: Tensor, features: Tensors, inputs: Tensors) -> Tensor:
        """The weighted sum. A decoder without weight is not run."""
        if not self.weight:
            return loss
        return loss + self.weight * mse_loss(self.decoder(features[0]).to(loss.dtype), inputs[0].to(loss.dtype))

    def extra_repr(self) -> str:
        """How much the reconstruction counts."""
        return f"weight={self.weight:g}"


class Enlarged(nn.Module):
    """[N, C, H, W] -> [N, C, *size], bilinear."""

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        self.size = tuple(size)

    def forward(self, x: Tensor) -> Tensor:
        """The image at the size of the model's input."""
        return interpolate(x, size=self.size, mode="bilinear", align_corners=True)


def decoder(features: Sequence[int], wanted: Sequence[int]) -> nn.Module:
    """From a stage's output to the model's input: of images by convolutions, of all else by two linear layers."""
    if len(features) == len(wanted) == 4:
        return nn.Sequential(
            Enlarged(wanted[2:]),
            nn.Conv2d(features[1], CHANNELS, 3, padding=1), nn.ReLU(),
            nn.Conv2d(CHANNELS, wanted[1], 3, padding=1),
        )  # fmt: skip
    given, made = math.prod(features[1:]), math.prod(wanted[1:])
    hidden = min(given, made)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(given, hidden), nn.ReLU(), nn.Linear(hidden, made), nn.Unflatten(1, tuple(wanted[1:]))
    )
