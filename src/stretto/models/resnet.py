"""ResNet with bottlenecks (He et al. 2016), the stride on the 3x3 convolution as torchvision has it."""

from functools import partial

from torch import Tensor, nn

from stretto.models.model import Recipe

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(*, depth: int = 152, classes: int = 1000) -> Recipe:
    """A stem, bottlenecks and an end, [N, 3, H, W] -> ... -> [N, classes], for images of any size from 32 on."""
    recipe: Recipe = [_stem]
    inputs = 64
    for group, number in enumerate(DEPTHS[depth]):
        width = 64 << group
        for index in range(number):
            stride = 2 if group and index == 0 else 1
            recipe.append(partial(Bottleneck, inputs, width, stride=stride))
            inputs = 4 * width
    return [*recipe, partial(_end, inputs, classes)]


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(outputs)]


def _stem() -> nn.Module:
    return nn.Sequential(*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))


def _end(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, [N, inputs, H, W] -> [N, 4 width, H / stride, W / stride]."""

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *_convolution(inputs, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )  # fmt: skip
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, 4 * width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Add both ways."""
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out
