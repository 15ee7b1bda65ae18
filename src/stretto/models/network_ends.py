"""The first and the last layer of decoders, encoders and vision transformers, around `ResidualBlock`s."""

import torch
from torch import Tensor, nn

from stretto.models.core_attention import Dropout
from stretto.models.eager_operators import EagerLinear
from stretto.models.residual_block import BlockShape
from stretto.models.transformer import Embedding, unembedding


class TokenStart(nn.Module):
    """Tokens int64 [N, T] -> [N, T, width]: embedded, with positions unless rotary, all of the first of `types`."""

    def __init__(self, shape: BlockShape, vocabulary: int, types: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, shape.context if shape.positions == "learned" else None, shape.width)
        self.token_type = nn.Embedding(types, shape.width) if types else None
        self.dropout = Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed the tokens."""
        embedded: Tensor = self.embedding(tokens)
        if self.token_type is not None:
            embedded = embedded + self.token_type.weight[0]
        out: Tensor = self.dropout(embedded)
        return out


class PatchStart(nn.Module):
    """Images [N, 3, H, W] -> [N, T, width]: a token for the class, then one for each patch, with positions."""

    def __init__(self, shape: BlockShape, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.position = nn.Parameter(torch.empty(1, shape.context, shape.width).normal_(std=0.02))
        self.dropout = Dropout(shape.dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Embed the patches."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1)
        out: Tensor = self.dropout(tokens + self.position)
        return out


class LogitsEnd(nn.Module):
    """Final norm and logits, [N, T, width] -> [N, T, V]."""

    def __init__(self, shape: BlockShape, vocabulary: int) -> None:
        super().__init__()
        self.norm = shape.normalisation()
        self.score = unembedding(vocabulary, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """The logits at every position."""
        logits: Tensor = self.score(self.norm(x))
        return logits


class MaskedTokenEnd(nn.Module):
    """Final norm; Linear, GELU and norm; logits with a bias (Devlin et al. 2019), [N, T, width] -> [N, T, V]."""

    def __init__(self, shape: BlockShape, vocabulary: int) -> None:
        super().__init__()
        self.norm = shape.normalisation()
        transform = nn.Linear if shape.fused else EagerLinear
        self.transform = nn.Sequential(transform(shape.width, shape.width), shape.activation(), shape.normalisation())
        self.score = transform(shape.width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """The logits at every position."""
        logits: Tensor = self.score(self.transform(self.norm(x)))
        return logits


class ClassifierEnd(nn.Module):
    """Final norm, and the logits of the first token, [N, T, width] -> [N, classes]."""

    def __init__(self, shape: BlockShape, classes: int) -> None:
        super().__init__()
        self.norm = shape.normalisation()
        self.score = nn.Linear(shape.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the first token."""
        logits: Tensor = self.score(self.norm(x)[:, 0])
        return logits
