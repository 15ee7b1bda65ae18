"""Pictures of any size as images of one size, decoded when a batch needs them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.errors import UsageError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training pictures, as the field takes them
CENTRE = 0.875  # of the shorter side: 224 of 256
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop (Szegedy et al. 2015)

Open = Callable[[int], Any]
"""A function from a row to its PIL image."""


class Pictures:
    """Examples x float32 [N, 3, side, side]: crops of the pictures that `opens` opens, one for each of `rows`."""

    def __init__(self, opens: Open, rows: Sequence[int], side: int) -> None:
        pillow()  # raises now rather than at the first batch
        self._opens = opens
        self._rows = rows
        self._side = side

    @property
    def shape(self) -> torch.Size:
        """The shape [N, 3, side, side] of all examples."""
        return torch.Size((len(self), 3, self._side, self._side))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: int | slice | Tensor) -> Tensor:
        if isinstance(rows, int):
            return self._stack([rows], _centre)[0]
        chosen = range(*rows.indices(len(self))) if isinstance(rows, slice) else rows.tolist()
        return self._stack(chosen, _centre)

    def cropped(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Random crops of these rows, resized to side x side, half of them mirrored (Szegedy et al. 2015)."""
        draws = torch.rand(len(rows), 5, generator=generator).tolist()
        boxes = iter(draws)
        images = self._stack(rows.tolist(), lambda width, height: _random(width, height, next(boxes)))
        mirrored = torch.tensor([draw[4] < 0.5 for draw in draws])
        return torch.where(mirrored[:, None, None, None], images.flip(3), images)

    def _stack(self, rows: Iterable[int], box_of: Callable[[int, int], tuple[float, ...]]) -> Tensor:
        images, size, smooth = [], (self._side, self._side), pillow().Resampling.BILINEAR
        for row in rows:
            with self._opens(self._rows[row]) as picture:
                box = box_of(*picture.size)
                images.append(np.asarray(picture.convert("RGB").resize(size, smooth, box)))
        stacked = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(channels)[:, None, None] for channels in (MEAN, STD))
        return ((stacked - mean) / std).contiguous()


def random_crop(pictures: Pictures, rows: Tensor, generator: torch.Generator) -> Tensor:
    """Random crops of these rows: a `Split`'s augment."""
    return pictures.cropped(rows, generator)


def pillow() -> Any:
    """PIL.Image. Raises UsageError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            'pictures are decoded by Pillow, which is not installed: pip install pillow, or "stretto[images]"'
        ) from error
    return Image


def _centre(width: int, height: int) -> tuple[float, ...]:
    side = CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random(width: int, height: int, draw: Sequence[float]) -> tuple[float, ...]:
    # Where a crop would be wider or higher than the picture, it is as wide or as high.
    area = width * height * (AREA[0] + (AREA[1] - AREA[0]) * draw[0])
    low, high = map(math.log, RATIO)
    ratio = math.exp(low + (high - low) * draw[1])
    across, down = min(width, math.sqrt(area * ratio)), min(height, math.sqrt(area / ratio))
    left, top = (width - across) * draw[2], (height - down) * draw[3]
    return left, top, left + across, top + down
