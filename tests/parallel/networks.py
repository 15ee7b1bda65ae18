"""A ResNet-50 and U-Nets as people write them, knowing nothing of slabs."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, inner, planes, stride=1):
        super().__init__()
        outer = 4 * planes
        self.conv1, self.bn1 = nn.Conv2d(inner, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, outer, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, layers=(3, 4, 6, 3), width=64, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, inner = [], width
        for index, count in enumerate(layers):
            planes = width * 2**index
            for block in range(count):
                stages.append(Bottleneck(inner, planes, 2 if index and not block else 1))
                inner = 4 * planes
        self.layers = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inner, num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 1))


class Double(nn.Sequential):
    def __init__(self, inner, outer, norm):
        make = (lambda: nn.BatchNorm2d(outer)) if norm == "batch" else (lambda: nn.GroupNorm(2, outer))
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1), make(), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding="same"), make(), nn.LeakyReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """Skips are padded to the size of what they meet, by arithmetic on shapes."""

    def __init__(self, up, norm="batch", width=4, dropout=0.0):
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.start = Double(3, sizes[0], norm)
        self.down = nn.ModuleList(Double(a, b, norm) for a, b in pairwise(sizes))
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(b, b, 2, 2) if up == "transposed"
            else nn.Upsample(scale_factor=2, mode="bilinear", align_corners=up == "corners")
            for b in reversed(sizes[1:])
        )  # fmt: skip
        self.merge = nn.ModuleList(
            Double(a + b, a, norm) for a, b in zip(reversed(sizes[:-1]), reversed(sizes[1:]), strict=True)
        )
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        skips = [self.start(x)]
        for block in self.down:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = self.dropout(skips.pop())
        for up, merge in zip(self.ups, self.merge, strict=True):
            x, skip = up(x), skips.pop()
            high, wide = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
            x = merge(torch.cat([skip, x], dim=1))
        return self.out(x)


class Excited(nn.Module):
    """Squeeze and excitation, layer scale, a position embedding, channels last, a broadcast mean: free code."""

    def __init__(self, shape):
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 4, *shape))
        self.stem, self.squeeze = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.scale, self.norm, self.mix = nn.Parameter(torch.randn(4, 1, 1)), nn.LayerNorm(4), nn.Linear(4, 4)
        self.act = nn.PReLU(4)
        self.head = nn.Linear(4 * (shape[0] - 2) * (shape[1] - 1), 3)

    def forward(self, x):
        x = self.stem(x) + self.place
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3), keepdim=True)))
        y = self.mix(F.gelu(self.norm(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        a, b = (x + self.scale * y).chunk(2, dim=1)
        x = self.act(torch.stack([b, a], 1).flatten(1, 2)).softmax(dim=1)
        x = x - x.mean() + x.amax((2, 3), keepdim=True)
        return self.head(torch.flatten(x[:, :, 1:-1, 1:], 1))


class Next(nn.Module):
    """A block with channels last: its linear layers work on each pixel."""

    def __init__(self):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.up, self.down, self.scale = nn.Linear(4, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)
