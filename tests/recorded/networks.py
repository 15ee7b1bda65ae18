"""Small networks in stages, plain torch, and batches for them: each decided by a seed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stretto

VOCABULARY, TOKENS, WIDTH, IGNORED = 11, 6, 8, -100


@dataclass(frozen=True)
class Network:
    """A model in stages, batches of `size` examples, and what makes the loss (older versions lack some)."""

    stages: Callable[[], list[nn.Module]]
    batch: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    loss: Callable[[], Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]]


class Tokens(nn.Module):
    """Token and position embeddings: [N, T] -> [N, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions


class Block(nn.Module):
    """Causal self-attention and an MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(x)


class Unembed(nn.Module):
    """[N, T, WIDTH] -> [N, T, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.unembed = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.unembed(self.norm(x))


class Classify(nn.Module):
    """[N, T, WIDTH] -> [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.mean(1))


class Fork(nn.Module):
    """Hands on two tensors: the second is a skip connection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, skip: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.layer(x), x if skip is None else skip


class Join(nn.Module):
    """Ends a skip connection."""

    def __init__(self, layer: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.layer, self.skip = layer, skip

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.layer(torch.tanh(x) + self.skip(skip))


def mlp() -> list[nn.Module]:
    """Linear stages, with dropout in the second and LayerNorm in the third."""
    return [
        nn.Sequential(nn.Linear(10, 12), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2), nn.Tanh()),
        nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.ReLU()),
        nn.Sequential(nn.Linear(12, 5)),
    ]


def short() -> list[nn.Module]:
    """Two stages, for checkpoints that are kept."""
    return [nn.Sequential(nn.Linear(10, 4), nn.Tanh()), nn.Linear(4, 5)]


def skipping() -> list[nn.Module]:
    """An MLP whose first three stages hand on two tensors."""
    stages = [Fork(nn.Linear(10, 12)), Fork(nn.Linear(12, 12)), Fork(nn.Linear(12, 12))]
    return [*stages, Join(nn.Linear(12, 5), nn.Linear(10, 12))]


def cnn() -> list[nn.Module]:
    """Convolutions with BatchNorm and GroupNorm."""
    return [
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
    ]


def images() -> list[nn.Module]:
    """Convolutions without BatchNorm: what processes that share images train alike."""
    return [
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)),
    ]


def transformer() -> list[nn.Module]:
    """A decoder."""
    return [Tokens(), Block(), Block(), Unembed()]


def classifier() -> list[nn.Module]:
    """A transformer that gives one answer a sentence."""
    return [Tokens(), Block(), Block(), Classify()]


def tied() -> list[nn.Module]:
    """A decoder whose first and last stage share the embedding."""
    stages = transformer()
    stages[3].unembed.weight = stages[0].tokens.weight
    return stages


def vectors(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """[N, 10] and one of five classes."""
    return torch.randn(size, 10, generator=generator), torch.randint(5, (size,), generator=generator)


def pictures(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """[N, 1, 8, 8] and one of five classes."""
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(5, (size,), generator=generator)


def sentences(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """[N, T] tokens and the following ones; of each sentence but the first some do not count."""
    tokens = torch.randint(VOCABULARY, (size, TOKENS + 1), generator=generator)
    lengths = torch.randint(1, TOKENS + 1, (size, 1), generator=generator)
    lengths[0] = TOKENS
    targets = tokens[:, 1:].masked_fill(torch.arange(TOKENS) >= lengths, IGNORED)
    return tokens[:, :-1].contiguous(), targets


def questions(generator: torch.Generator, size: int) -> tuple[Tensor, Tensor]:
    """[N, T] tokens and one of five classes."""
    return torch.randint(VOCABULARY, (size, TOKENS), generator=generator), torch.randint(
        5, (size,), generator=generator
    )


def squares(output: Tensor, target: Tensor) -> Tensor:
    """A mean over examples that only `stretto.mean` vouches for."""
    return (output - F.one_hot(target, output.shape[1])).square().mean()


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over the tokens that count, and how many those are."""
    counts = target != IGNORED
    return F.cross_entropy(output[counts], target[counts], reduction="sum"), counts.sum()


NETWORKS: dict[str, Network] = {
    "mlp": Network(mlp, vectors, lambda: F.cross_entropy),
    "short": Network(short, vectors, lambda: F.cross_entropy),
    "mlp, squares": Network(mlp, vectors, lambda: stretto.mean(squares)),
    "skipping": Network(skipping, vectors, lambda: F.cross_entropy),
    "cnn": Network(cnn, pictures, lambda: F.cross_entropy),
    "images": Network(images, pictures, lambda: F.cross_entropy),
    "transformer": Network(transformer, sentences, lambda: stretto.losses.token_cross_entropy),
    "transformer, counted": Network(transformer, sentences, lambda: counted),
    "classifier": Network(classifier, questions, lambda: F.cross_entropy),
    "tied": Network(tied, sentences, lambda: stretto.losses.token_cross_entropy),
}


def make(network: str, seed: int) -> list[nn.Module]:
    """The stages; the global generator is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return NETWORKS[network].stages()
