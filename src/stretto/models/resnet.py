"""ResNets (He et al. 2016): those for ImageNet by residual blocks, those for CIFAR-10 in the finest layers."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from stretto.data import Dataset
from stretto.models.images import NORMS, activated, convolution, image_of, normalisation
from stretto.models.model import Recipe
from stretto.options.named import choose

DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
CIFAR_DEPTHS = (20, 32, 44, 56, 110)


def resnet(dataset: Dataset, *, depth: int = 18, norm: str = "batch") -> Recipe:
    """A ResNet as for ImageNet, [N, C, H, W] -> ... -> [N, classes], for sides of 32 pixels or more.

    Its layers are a stem, residual blocks, and a classifier. depth: 18 or 34 (two 3x3 convolutions a block), 50, 101
    or 152 (bottlenecks). norm: batch or group.
    """
    channels, _ = image_of("resnet", dataset, least=32)
    return imagenet_resnet(depth=depth, channels=channels, classes=dataset.num_classes, norm=norm)


def imagenet_resnet(
    *, depth: int, channels: int = 3, classes: int = 1000, norm: str = "batch", factor: int = 1
) -> Recipe:
    """The same network without data. Strides are on the 3x3 convolutions, as in torchvision.

    `factor` multiplies the channels of the 3x3 convolutions: wide ResNets (Zagoruyko and Komodakis 2016).
    """
    choose("model 'resnet'", "depth", depth, tuple(DEPTHS))
    choose("model 'resnet'", "norm", norm, NORMS)
    recipe: Recipe = [partial(_stem, channels, norm)]
    inputs = 64
    for group, number in enumerate(DEPTHS[depth]):
        width = 64 << group
        outputs = factor * width if depth < 50 else 4 * width
        block = Basic if depth < 50 else partial(Bottleneck, outputs=outputs)
        for index in range(number):
            stride = 2 if group and index == 0 else 1
            recipe.append(partial(block, inputs, factor * width, stride=stride, norm=norm))
            inputs = outputs
    return [*recipe, partial(_classifier, inputs, classes)]


def cifar_resnet(dataset: Dataset, *, depth: int = 20, norm: str = "batch") -> Recipe:
    """A ResNet as for CIFAR-10, [N, C, H, W] -> ... -> [N, classes], for sides of 4 pixels or more.

    It has three groups of 16, 32 and 64 channels. A block is three layers, which pass the shortcut's tensor on: two
    convolutions, each with its norm, and the sum. A shortcut to the next group is a layer of its own, without
    parameters: every second pixel, and new channels of zeros (option A). ResNet-20 has 34 layers, the number of stages
    of Kosson et al. 2021; they do not say how they count, so these layers are our choice.

    depth: 20, 32, 44, 56 or 110. norm: batch or group.
    """
    channels, _ = image_of("cifar-resnet", dataset, least=4)
    choose("model 'cifar-resnet'", "depth", depth, CIFAR_DEPTHS)
    choose("model 'cifar-resnet'", "norm", norm, NORMS)
    recipe: Recipe = [partial(convolution, channels, 16), partial(activated, 16, norm)]
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            stride = width // inputs
            recipe += [partial(FirstConvolution, inputs, width, stride, norm), partial(SecondConvolution, width, norm)]
            if stride > 1:
                recipe.append(partial(PaddedShortcut, width - inputs))
            recipe.append(ReluSum)
            inputs = width
    return [*recipe, partial(nn.AdaptiveAvgPool2d, 1), nn.Flatten, partial(nn.Linear, 64, dataset.num_classes)]


def _normalised(inputs: int, outputs: int, kernel: int, stride: int = 1, *, norm: str) -> list[nn.Module]:
    return [convolution(inputs, outputs, kernel, stride), normalisation(norm, outputs)]


def _stem(channels: int, norm: str) -> nn.Module:
    return nn.Sequential(
        *_normalised(channels, 64, 7, 2, norm=norm), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
    )


def _classifier(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Residual(nn.Module):
    """ReLU of branch + shortcut, [N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.branch = branch
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normalised(inputs, outputs, 1, stride, norm=norm))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch and the shortcut, then ReLU."""
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


class Basic(Residual):
    """Two 3x3 convolutions of `width` channels."""

    def __init__(self, inputs: int, width: int, *, stride: int = 1, norm: str = "batch") -> None:
        branch = nn.Sequential(
            *_normalised(inputs, width, 3, stride, norm=norm),
            nn.ReLU(inplace=True),
            *_normalised(width, width, 3, norm=norm),
        )
        super().__init__(branch, inputs, width, stride=stride, norm=norm)


class Bottleneck(Residual):
    """1x1, 3x3 and 1x1 convolutions, of `width`, `width` and `outputs` channels; 4 `width` unless said otherwise."""

    def __init__(
        self, inputs: int, width: int, *, outputs: int | None = None, stride: int = 1, norm: str = "batch"
    ) -> None:
        outputs = outputs or 4 * width
        branch = nn.Sequential(
            *_normalised(inputs, width, 1, norm=norm),
            nn.ReLU(inplace=True),
            *_normalised(width, width, 3, stride, norm=norm),
            nn.ReLU(inplace=True),
            *_normalised(width, outputs, 1, norm=norm),
        )
        super().__init__(branch, inputs, outputs, stride=stride, norm=norm)


class FirstConvolution(nn.Module):
    """x -> (h, x), h being ReLU of the normalised convolution of x."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_normalised(inputs, outputs, 3, stride, norm=norm), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), x


class SecondConvolution(nn.Module):
    """(h, x) -> (normalised convolution of h, x)."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_normalised(channels, channels, 3, norm=norm))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(h), x


class PaddedShortcut(nn.Module):
    """(h, x) -> (h, every second pixel of x, and `new_channels` channels of zeros)."""

    def __init__(self, new_channels: int) -> None:
        super().__init__()
        self.new_channels = new_channels

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return h, pad(x[..., ::2, ::2], (0, 0, 0, 0, 0, self.new_channels))


class ReluSum(nn.Module):
    """(h, x) -> ReLU of their sum."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        """Add the branch and the shortcut, then ReLU: the output of the block."""
        return relu(h + x)
