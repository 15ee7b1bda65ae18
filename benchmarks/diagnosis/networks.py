"""Three networks with a batch and a loss each, in plain PyTorch, for mistakes made by hand, without Stretto."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, TOKENS, WORDS, WIDTH = 16, 12, 40, 32
IGNORED = -100


class Setup(NamedTuple):
    """A network, a batch of it, and a loss (output, target) -> mean: one step."""

    model: nn.Module
    inputs: Any
    target: Tensor
    loss: Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A mistake: what was done, in words, and what a step with it comes to.

    `network` is mlp, cnn or gpt. `gradients` gets a fresh Setup and returns gradients by the names of
    `model.named_parameters()`; None or no key where there is none. `options` are what a user would tell `diagnose`.
    `truth` names the mistakes. `weights`: what the Setup's model is changed to before anything, by its own function.
    """

    title: str
    network: str
    dtype: torch.dtype
    gradients: Callable[[Setup], dict[str, Tensor | None]]
    truth: tuple[str, ...]
    options: "dict[str, Any] | Callable[[Setup], dict[str, Any]]"


def mlp(dtype: torch.dtype) -> Setup:
    """Four linear layers, 16 examples, five classes."""
    sizes = [10, 24, 24, 24]
    hidden = [nn.Sequential(nn.Linear(size, 24), nn.Tanh()) for size in sizes]
    model = nn.Sequential(*hidden, nn.Linear(24, 5))
    x = torch.randn(ROWS, 10)
    return Setup(model.to(dtype), x.to(dtype), torch.randint(0, 5, (ROWS,)), functional.cross_entropy)


class Block(nn.Module):
    """A residual block of two convolutions with batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """The input plus what the block makes of it."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(x + self.norm2(self.conv2(inner)))


def cnn(dtype: torch.dtype) -> Setup:
    """A small residual network with batch norms, in training, 16 images of 8 x 8."""
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
    )
    x = torch.randn(ROWS, 2, 8, 8)
    return Setup(model.to(dtype), x.to(dtype), torch.randint(0, 6, (ROWS,)), functional.cross_entropy)


class Decoder(nn.Module):
    """A block of a language model: causal attention and an MLP, norms before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Output of [rows, tokens, width]."""
        rows, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model of four blocks whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Decoder(WIDTH, 4) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [rows, tokens, words] for tokens [rows, tokens]."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean over the tokens that are not padding; targets are shifted already."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def gpt(dtype: torch.dtype) -> Setup:
    """16 rows of up to 12 tokens, padded; targets are the next tokens, -100 at padding."""
    model = GPT()
    with torch.no_grad():
        model.words.weight.mul_(0.3)
    tokens = torch.randint(1, WORDS, (ROWS, TOKENS + 1))
    lengths = torch.randint(3, TOKENS + 1, (ROWS,))
    padded = torch.arange(TOKENS)[None] >= lengths[:, None]
    inputs = tokens[:, :-1].masked_fill(padded, 0)
    target = tokens[:, 1:].masked_fill(padded, IGNORED)
    return Setup(model.to(dtype), inputs, target, next_token_loss)


NETWORKS = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


def setup(network: str, dtype: torch.dtype, seed: int = 0) -> Setup:
    """The same network and batch for the same seed."""
    torch.manual_seed(seed)
    return NETWORKS[network](dtype)
