"""What the networks of images have in common: the shape of their examples, and the layers they are made of."""

from torch import nn

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.nn.group_norm import like

NORMS = ("batch", "group")


def image_of(model: str, dataset: Dataset, *, least: int = 1) -> tuple[int, int]:
    """An example's channels and shorter side. Raises UsageError if it is no image, or has a side below `least`."""
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
    """One that leaves the image's size, divided by the stride; a norm behind it would take a bias out."""
    made = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    if bias:
        made.bias = nn.Parameter(made.weight.new_zeros(outputs))
    return made


def normalisation(kind: str, channels: int) -> nn.Module:
    """Over the batch, or over groups of two channels, which single examples need (`stretto.nn.group_norm`)."""
    batch = nn.BatchNorm2d(channels)
    return batch if kind == "batch" else like(batch, 2)


def activated(channels: int, norm: str) -> nn.Module:
    """ReLU behind a norm, or alone if it is "none"."""
    return nn.ReLU() if norm == "none" else nn.Sequential(normalisation(norm, channels), nn.ReLU())
