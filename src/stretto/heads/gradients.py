"""Modules that predict the gradient of a stage's output (synthetic gradients, Jaderberg et al. 2017, arXiv 1608.05343).

    linear   [N, d], [N, T, d]    a Linear, with a LayerNorm before it for tokens
    mlp      [N, d], [N, T, d]    as linear, with hidden layers with ReLU before it
    conv     [N, C, H, W]         hidden convolutions with ReLU, if any, and a convolution

As in the paper the last layer's weights start at zero, and so does the prediction. With labels (the paper's cDNI) the
class numbers, one-hot, are further inputs of the first layer: a table of vectors that are added to its outputs.
The sizes of hidden layers are ours. "auto" is "linear", for images "conv".

A module of one's own takes the stage's tensors, and `target=` where the method has labels; it returns the prediction
for the first tensor, or a tuple of one for each, in the unit of `rows`.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.heads.head import HeadKind, Site
from stretto.options.checks import shown
from stretto.options.named import whole

VECTORS, TOKENS = 2, 3  # dims of [N, d] and of [N, T, d]; more are images [N, C, ...]


def rows(tensor: Tensor) -> int:
    """The number of examples, tokens or positions in a stage's tensor [N, d], [N, T, d] or [N, C, H, W].

    A prediction is the gradient of the mean loss times this number, so that it hardly depends on the batch's size: the
    unit is ours.
    """
    if tensor.dim() == TOKENS:
        return tensor.shape[0] * tensor.shape[1]
    return tensor.numel() // tensor.shape[1] if tensor.dim() > 1 else tensor.shape[0]


class GradientModel(nn.Module):
    """Predicts the gradient of one tensor from it, and from the class numbers [N] or [N, T] if it is `labelled`.

    `layers` begin with a norm or not, then the layer to which the labels' vectors are added.
    """

    def __init__(self, norm: nn.Module, layers: list[nn.Module], classes: int | None) -> None:
        super().__init__()
        self.norm = norm
        self.first = layers[0]
        self.rest = nn.Sequential(*layers[1:])
        self.labels: nn.Embedding | None = None
        bias = self.first.bias
        assert isinstance(bias, Tensor)
        if classes is not None:
            self.labels = nn.Embedding(classes, bias.numel())
            nn.init.uniform_(self.labels.weight, -(bias.numel() ** -0.5), bias.numel() ** -0.5)
        last = [layer for layer in layers if hasattr(layer, "weight")][-1]
        for layer in (last, self.labels) if last is self.first else (last,):
            for parameter in () if layer is None else layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, target: object = None) -> Tensor:
        y: Tensor = self.first(self.norm(x))
        if self.labels is not None:
            y = y + self._of_labels(target, x)
        output: Tensor = self.rest(y)
        return output

    def _of_labels(self, target: object, x: Tensor) -> Tensor:
        assert self.labels is not None
        shapes = (x.shape[:1], x.shape[:2]) if x.dim() == TOKENS else (x.shape[:1],)
        if not isinstance(target, Tensor) or target.is_floating_point() or target.shape not in shapes:
            raise UsageError(
                f"synthetic-gradients(labels=True): the target is {shown(target)}, behind a stage that gives "
                f"{list(x.shape)}: it is for class numbers [N], or [N, T] for tokens [N, T, d]; leave labels= out"
            )
        known = (target >= 0) & (target < self.labels.num_embeddings)  # others, such as -100, do not count
        vectors: Tensor = self.labels(target.where(known, 0)) * known.unsqueeze(-1)
        if x.dim() == TOKENS:
            return vectors if target.dim() == 2 else vectors.unsqueeze(1)
        return vectors.reshape(*vectors.shape, *[1] * (x.dim() - VECTORS))


class OfEach(nn.Module):
    """A module for each floating-point tensor that a stage returns; the others have no gradient."""

    def __init__(self, models: dict[int, nn.Module], count: int) -> None:
        super().__init__()
        self.of = nn.ModuleDict({str(index): model for index, model in models.items()})
        self.count = count

    def forward(self, *features: Tensor, target: object = None) -> tuple[Tensor | None, ...]:
        return tuple(
            self.of[str(index)](features[index], target) if str(index) in self.of else None
            for index in range(self.count)
        )


def of_each(at: Site, build: Callable[[Tensor, int | None], nn.Module]) -> nn.Module:
    """`build(tensor, classes)` for each floating-point tensor behind a stage; `classes` is None without labels."""
    models: dict[int, nn.Module] = {}
    for index, tensor in enumerate(at.features):
        if tensor.is_floating_point():
            if tensor.dim() < VECTORS:
                raise UsageError(
                    f"stage {at.stage} gives {list(tensor.shape)} as its tensor number {index}: gradients are "
                    "predicted for [N, d], [N, T, d] and [N, C, ...]; cut the model elsewhere, or give heads=[...] of "
                    "your own"
                )
            models[index] = build(tensor, at.classes if at.labelled else None)
    return OfEach(models, len(at.features))


def position_wise(tensor: Tensor, width: int, hidden: int, classes: int | None) -> nn.Module:
    """Linear layers on the last dim, `hidden` of them with ReLU."""
    size = tensor.shape[-1]
    layers = stacked(nn.Linear, size, width, hidden)
    return GradientModel(nn.LayerNorm(size) if tensor.dim() == TOKENS else nn.Identity(), layers, classes)


def convolutional(tensor: Tensor, width: int, hidden: int, kernel: int, classes: int | None) -> nn.Module:
    """Convolutions that keep the image's size, `hidden` of them with ReLU."""
    convolution = nn.Conv3d if tensor.dim() == 5 else nn.Conv2d
    make = partial(convolution, kernel_size=kernel, padding="same")
    return GradientModel(nn.Identity(), stacked(make, tensor.shape[1], width, hidden), classes)


def stacked(make: Callable[[int, int], nn.Module], size: int, width: int, hidden: int) -> list[nn.Module]:
    """Layers that `make` builds for their numbers of inputs and outputs, `hidden` of them with ReLU behind."""
    sizes = [size, *[width] * hidden, size]
    layers = [make(sizes[0], sizes[1])]
    for before, after in pairwise(sizes[1:]):
        layers += [nn.ReLU(), make(before, after)]
    return layers


def linear(at: Site) -> nn.Module:
    """A Linear for [N, d] and [N, T, d]."""
    return of_each(at, lambda tensor, classes: position_wise(tensor, 1, 0, classes))


def mlp(at: Site, *, hidden: int = 1, width: int | None = None) -> nn.Module:
    """`hidden` hidden layers of `width`, by default as wide as the tensor, for [N, d] and [N, T, d]."""
    check("mlp", hidden, width)
    return of_each(at, lambda tensor, classes: position_wise(tensor, width or tensor.shape[-1], hidden, classes))


def conv(at: Site, *, hidden: int = 1, width: int | None = None, kernel: int = 3) -> nn.Module:
    """`hidden` hidden layers, 0 or more, of `width` channels, by default as many as the tensor's, for images."""
    check("conv", hidden, width, least=0)
    whole("head 'conv'", "kernel", kernel)
    return of_each(at, lambda tensor, classes: convolutional(tensor, width or tensor.shape[1], hidden, kernel, classes))


def check(name: str, hidden: int, width: int | None, least: int = 1) -> None:
    """Raise UsageError for fewer than `least` hidden layers, or a width below 1."""
    whole(f"head {name!r}", "hidden", hidden, least=least)
    if width is not None:
        whole(f"head {name!r}", "width", width)


def kind(build: Callable[..., Any], dims: Callable[[int], bool], takes: str, *, plain: bool = False) -> HeadKind:
    """A kind of module that predicts a gradient; the output's dims do not matter."""
    return HeadKind(lambda features, output: dims(features), build, takes, plain=plain, several=True)


GRADIENT_HEADS: dict[str, HeadKind] = {
    "linear": kind(linear, lambda f: f in (VECTORS, TOKENS), "[N, d] or [N, T, d] -> the same", plain=True),
    "mlp": kind(mlp, lambda f: f in (VECTORS, TOKENS), "[N, d] or [N, T, d] -> the same"),
    "conv": kind(conv, lambda f: f > TOKENS, "[N, C, H, W] -> the same", plain=True),
}
