"""A small residual network on Fashion-MNIST, from its idx files: `--data fashion-mnist --data-options.path FOLDER`."""

from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions beside a shortcut; the first may halve the image."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, channels_in, H, W] to [N, channels, H / stride, W / stride]."""
        return (self.convolutions(x) + self.shortcut(x)).relu()


class Network(nn.Module):
    """Six residual blocks between a first convolution and a linear layer: ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        sizes = [(width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1),
                 (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)]  # fmt: skip
        self.blocks = nn.ModuleList([Residual(*size) for size in sizes])
        self.classes = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 1, 28, 28] to logits [N, 10]."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean((2, 3)))


def build(width: int = 16) -> nn.Module:
    """The network, as `--model examples/fashion/own.py:build` asks for it."""
    return Network(width)
