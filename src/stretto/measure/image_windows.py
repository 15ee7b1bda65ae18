"""Which windows a layer slides over images, seen in its forward."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from stretto.cost.layer_table import Affine, ImageWindow
from stretto.parallel.space.geometry import Window
from stretto.parallel.space.table import AtOneRow, window_call


class SeenWindow(NamedTuple):
    """A convolution or pool in one forward; `pixel` are the bytes of one pixel of all examples."""

    sizes: tuple[int, int]
    windows: tuple[Window, Window]
    at_one_row: AtOneRow
    differentiated: bool
    pixel: int


class ImageWindows(TorchFunctionMode):
    """Writes down every convolution and pool of images that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[SeenWindow] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and write down its windows."""
        kwargs = kwargs or {}
        call = window_call(func, args, kwargs)
        if call is not None:
            height, width = call.x.shape[2:]
            pixel = call.x.shape[0] * call.x.shape[1] * call.x.element_size()
            self.seen.append(SeenWindow((height, width), call.windows, call.at_one_row, call.x.requires_grad, pixel))
        return func(*args, **kwargs)


def image_windows(examples: int, few: Sequence[SeenWindow], many: Sequence[SeenWindow]) -> tuple[ImageWindow, ...]:
    """The windows of a layer that was seen on `examples` examples and on twice as many.

    Where the two differ in number, a pixel's bytes are taken to grow with the examples.
    """
    again = [seen.pixel for seen in many] if len(few) == len(many) else [2 * seen.pixel for seen in few]
    return tuple(
        ImageWindow(
            sizes=seen.sizes,
            windows=seen.windows,
            at_one_row=seen.at_one_row,
            differentiated=seen.differentiated,
            pixel=Affine.through((examples, seen.pixel), (2 * examples, twice)),
        )
        for seen, twice in zip(few, again, strict=True)
    )
