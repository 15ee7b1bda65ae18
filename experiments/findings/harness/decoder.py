"""The decoder of studies 3 and 6: 8 blocks of width 64 on the bytes of the text, a stage for each block."""

from torch import nn

from harness import examples
from stretto.data import Dataset
from stretto.models import build

BLOCKS, WIDTH, CONTEXT, BATCH = 8, 64, 64, 16
WINDOWS = 256  # of the test and of the validation text, in one batch


def text(path: str | None) -> Dataset:
    """The bytes of the text in the folder, in the decoder's windows."""
    return examples.text(path, CONTEXT)


def decoder(data: Dataset, seed: int) -> list[nn.Module]:
    """The built-in `transformer`: the embedding is in the first stage, the readout in the last one."""
    return build("transformer", data, seed=seed, depth=BLOCKS, width=WIDTH).layers
