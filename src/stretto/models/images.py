"""Parts that the networks for images share: the shape of examples, convolutions, normalisations."""

from torch import nn

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.nn.group_norm import group_norm_for

NORMS = ("batch", "group")


def image_of(model: str, dataset: Dataset, *, least: int = 1) -> tuple[int, int]:
    """The channels and the shorter side of examples. Raises UsageError for no images, or a side below `least`."""
    shape = dataset.train.x.shape
    if len(shape) != 4:
        raise UsageError(
            f"model {model!r} needs images [N, channels, height, width], but the examples of data set {dataset.name!r} "
            f"have the shape {list(shape)}; add the missing dimensions, or take model 'mlp'"
        )
    side = min(shape[2:])
    if side < least:
        remedy = f"--data-options.side {least}" if dataset.name == "digits" else "larger images, or model 'cnn'"
        raise UsageError(
            f"model {model!r} needs images of {least} x {least} pixels or more, but those of data set "
            f"{dataset.name!r} are {shape[2]} x {shape[3]}; take {remedy}"
        )
    return shape[1], side


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, bias: bool = False) -> nn.Conv2d:
    """A padded convolution: the image's size is divided by the stride. A norm behind it makes a `bias` useless."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if bias:
        layer.bias = nn.Parameter(layer.weight.new_zeros(outputs))
    return layer


def normalisation(kind: str, channels: int) -> nn.Module:
    """Batch normalisation, or group normalisation with two channels a group (`stretto.nn.group_norm`)."""
    batch = nn.BatchNorm2d(channels)
    return batch if kind == "batch" else group_norm_for(batch, 2)


def activated(channels: int, norm: str) -> nn.Module:
    """A norm and ReLU; ReLU alone if `norm` is "none"."""
    return nn.ReLU() if norm == "none" else nn.Sequential(normalisation(norm, channels), nn.ReLU())
