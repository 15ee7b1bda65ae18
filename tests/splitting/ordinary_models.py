"""Networks as people write them: a stem, lists of blocks of different cost, a head."""

import torch
from torch import Tensor, nn


class Unit(nn.Module):
    """Convolution, norm, nonlinearity."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)))


class Stemmed(nn.Module):
    """The head is the only list there is, and costs next to nothing."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.b1, self.b2 = Unit(3, width), Unit(width, width), Unit(width, width)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b2(self.b1(self.stem(x))))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.down(x))


class SmallResNet(nn.Module):
    """Most parameters are in layer3, most operations before it."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2), BasicBlock(4 * width, 4 * width, 1))
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(4 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.relu(self.norm(self.conv(x))))))
        return self.fc(self.drop(x.mean((2, 3))))


class Encoder(nn.Module):
    """A list of two: a sequence of nearly all layers, and a norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
        self.enc = nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(width))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enc(x))


class Once(nn.Module):
    """Two halves of several layers each, called one after the other: no list, and nothing that torch.fx can part."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.big = Halves(width)
        self.head = nn.Sequential(nn.Linear(width, 2), nn.Tanh(), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.big(x))


class Halves(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def nested() -> nn.Sequential:
    """Sequences within a sequence, one of them nearly all."""
    inner = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(4)])
    return nn.Sequential(nn.Linear(2, 8), inner, nn.Dropout(0.2), nn.Linear(8, 2))
