"""The networks of studies 7 and 11 as a user gives them to `stretto simulate`, with a few made-up examples."""

from typing import Any

import chunks
from harness.decoder import CONTEXT
from harness.decoder import decoder as build_decoder
from harness.examples import made_up
from torch import nn

from sections import trial_networks
from stretto.data import Dataset

CHARACTERS = 127  # different bytes of the text
IMAGE, CLASSES = (1, 28, 28), 10
EXAMPLES = 64


def decoder() -> list[nn.Module]:
    """The decoder of 8 blocks."""
    return build_decoder(_text(), 0)


def decoder_data() -> Any:
    """Windows of random bytes."""
    return _split(_text())


def resnet_20() -> list[nn.Module]:
    """ResNet-20 with group norms in eight stages."""
    return chunks.resnet(_images(), 0)


def resnet_20_data() -> Any:
    """Random images."""
    return _split(_images())


def mixer() -> list[nn.Module]:
    """Study 11's MLP-Mixer."""
    return trial_networks.mixer(0)


def separable() -> list[nn.Module]:
    """Study 11's separable convolutions."""
    return trial_networks.separable(0)


def recurrent() -> list[nn.Module]:
    """Study 11's LSTMs."""
    return trial_networks.recurrent(0, CHARACTERS)


mixer_data = separable_data = resnet_20_data
recurrent_data = decoder_data


def _text() -> Dataset:
    return made_up((CONTEXT,), CHARACTERS, tokens=True, examples=EXAMPLES)


def _images() -> Dataset:
    return made_up(IMAGE, CLASSES, examples=EXAMPLES)


def _split(data: Dataset) -> Any:
    return (data.train.x, data.train.y), (data.train.x, data.train.y)
