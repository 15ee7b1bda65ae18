"""The three networks of study 11, none of which has a part in the advice: eight blocks each, plain torch modules."""

import torch
from torch import Tensor, nn

WIDTH, BLOCKS, PATCH, SIDE, CLASSES, STATE = 48, 8, 7, 28, 10, 96


class Mixing(nn.Module):
    """A block of an MLP-Mixer (Tolstikhin et al. 2021): over patches, then over channels, [N, P, WIDTH]."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.over_patches, self.over_channels = _mlp(patches, 2 * patches), _mlp(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Both residual branches."""
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.over_channels(self.norms[1](x))
        return out


class Patches(nn.Module):
    """Images [N, 1, SIDE, SIDE] -> [N, P, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        """Embed each patch."""
        out: Tensor = self.embed(x).flatten(2).transpose(1, 2)
        return out


class Mean(nn.Module):
    """[N, P, WIDTH] -> logits [N, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.score = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The mean over patches, and its logits."""
        logits: Tensor = self.score(self.norm(x).mean(1))
        return logits


class Recurrent(nn.Module):
    """A residual LSTM with a norm before it, [N, T, STATE] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cells = nn.LayerNorm(STATE), nn.LSTM(STATE, STATE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """x + LSTM(norm(x)), from a state of zeros."""
        out, _ = self.cells(self.norm(x))
        summed: Tensor = x + out
        return summed


class Separable(nn.Module):
    """A residual block of depthwise and pointwise convolutions with a group norm, [N, C, H, W] -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 5, padding=2, groups=channels), nn.GroupNorm(4, channels),
            nn.Conv2d(channels, 2 * channels, 1), nn.GELU(), nn.Conv2d(2 * channels, channels, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """x and the branch."""
        out: Tensor = x + self.body(x)
        return out


def _mlp(size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))


def mixer(seed: int) -> list[nn.Module]:
    """An MLP-Mixer for Fashion-MNIST in eight stages."""
    torch.manual_seed(seed)
    blocks: list[nn.Module] = [Mixing((SIDE // PATCH) ** 2) for _ in range(BLOCKS)]
    return _stages(Patches(), blocks, Mean())


def recurrent(seed: int, characters: int) -> list[nn.Module]:
    """Residual LSTMs for text in eight stages."""
    torch.manual_seed(seed)
    blocks: list[nn.Module] = [Recurrent() for _ in range(BLOCKS)]
    end = nn.Sequential(nn.LayerNorm(STATE), nn.Linear(STATE, characters))
    return _stages(nn.Embedding(characters, STATE), blocks, end)


def separable(seed: int) -> list[nn.Module]:
    """Residual separable convolutions for Fashion-MNIST in eight stages."""
    torch.manual_seed(seed)
    channels = WIDTH // 2
    blocks: list[nn.Module] = [Separable(channels) for _ in range(BLOCKS)]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return _stages(nn.Conv2d(1, channels, 3, 2, 1), blocks, end)


def _stages(begin: nn.Module, blocks: list[nn.Module], end: nn.Module) -> list[nn.Module]:
    """A stage a block; the first and the last one have the ends, too."""
    first, *middle, last = blocks
    return [nn.Sequential(begin, first), *middle, nn.Sequential(last, end)]
