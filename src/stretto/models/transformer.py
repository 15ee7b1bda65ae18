"""A decoder-only language model: pre-norm, causal attention, learned or rotary positions."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.models.core_attention import fused_attention
from stretto.models.model import Recipe
from stretto.options.named import choose


def transformer(
    dataset: Dataset, *, depth: int = 4, width: int = 64, heads: int = 4, positions: str = "learned"
) -> Recipe:
    """`depth` blocks of attention and MLP, tokens [N, T] -> [N, T, width] -> ... -> logits [N, T, V].

    The first block also holds the embedding, the last one also the final normalisation and the unembedding. They are
    not tied: tied weights would join the two ends of the pipeline. positions: "learned", added to the embedding; or
    "rotary", in each attention.
    """
    choose("model 'transformer'", "positions", positions, ("learned", "rotary"))
    check_heads("transformer", width, heads)
    rotary = positions == "rotary"
    if rotary and (width // heads) % 2:
        raise UsageError(
            f"model 'transformer': positions='rotary' turns pairs, and width={width} with heads={heads} leaves "
            f"each head {width // heads}; take width={width + heads}"
        )
    context, vocabulary = dataset.train.x.shape[1], dataset.num_classes
    return [
        partial(
            _block,
            width=width,
            heads=heads,
            depth=depth,
            rotary=rotary,
            embedding=(vocabulary, None if rotary else context) if i == 0 else None,
            vocabulary=vocabulary if i == depth - 1 else None,
        )
        for i in range(depth)
    ]


def check_heads(model: str, width: int, heads: int) -> None:
    """Raise UsageError if the number of heads does not divide the width."""
    if width % heads:
        fitting = [h for h in range(1, width + 1) if width % h == 0]
        raise UsageError(
            f"model {model!r}: heads={heads} does not divide width={width}; "
            f"take heads={min(fitting, key=lambda h: abs(h - heads))}, or width={-(-width // heads) * heads}"
        )


def language_model(vocabulary: int, context: int, *, depth: int, width: int, heads: int) -> Recipe:
    """The same network without data, in `depth` + 2 layers: the embedding, the blocks, the unembedding."""
    block = partial(Block, width, heads, depth)
    return [partial(Embedding, vocabulary, context, width), *[block] * depth, partial(Unembedding, vocabulary, width)]


class Embedding(nn.Module):
    """Tokens int64 [N, T] -> [N, T, width]: token embedding plus position embedding, for T up to `context`.

    With `context` None there is no position embedding.
    """

    def __init__(self, vocabulary: int, context: int | None, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.1)
        self.position = None if context is None else nn.Embedding(context, width)
        if self.position is not None:
            nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens)
        if self.position is None:
            return embedded
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise UsageError(f"{length} tokens exceed the context of {context} that the transformer was built for")
        return embedded + self.position.weight[:length]


class CausalAttention(nn.Module):
    """Causal self-attention, [N, T, width] -> [N, T, width].

    Query, key and value are separate layers, and the number of heads is computed from their outputs: so a process that
    holds the rows of some heads only can run the same forward. `rotary` applies rotary positions to queries and keys.
    If not `whole`, the output layer is left to another module.
    """

    def __init__(self, width: int, heads: int, *, rotary: bool = False, whole: bool = True) -> None:
        super().__init__()
        self.head_width = width // heads
        self.rotary = rotary
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width) if whole else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(2, (-1, self.head_width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.rotary:
            query, key = rotated(query), rotated(key)
        mixed = fused_attention(query, key, value, causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor) -> Tensor:
    """x [N, heads, T, d] with pair (i, i + d/2) of each token rotated by position * 10000^(-2i/d) (Su et al. 2021)."""
    length, width = x.shape[2:]
    rates = 10_000.0 ** (torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / -width)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=x.device), rates)
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    one, other = x.chunk(2, dim=3)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=3)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int, heads: int, depth: int, *, rotary: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, rotary=rotary)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)
        initialise(self, ("attention.output", "mlp.2"), depth)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def mlp(width: int) -> nn.Sequential:
    """The two-layer perceptron of a block, with 4 `width` hidden units."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def initialise(block: nn.Module, writers: Sequence[str], depth: int) -> None:
    """Initialise a block's Linear layers to keep the variance of their inputs.

    The layers named in `writers` add to the residual stream: those of all `depth` blocks share its variance.
    """
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            shared = len(writers) * depth if name in writers else 1
            nn.init.normal_(module.weight, std=(module.in_features * shared) ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def unembedding(vocabulary: int, width: int) -> nn.Linear:
    """A Linear without bias from features to the logits of all tokens."""
    score = nn.Linear(width, vocabulary, bias=False)
    nn.init.normal_(score.weight, std=0.02)
    return score


class Unembedding(nn.Module):
    """Final normalisation and logits, [N, T, width] -> [N, T, V]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = unembedding(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.score(self.norm(x))
        return logits


def _block(
    *,
    width: int,
    heads: int,
    depth: int,
    rotary: bool,
    embedding: tuple[int, int | None] | None,
    vocabulary: int | None,
) -> nn.Module:
    parts: list[nn.Module] = [Block(width, heads, depth, rotary=rotary)]
    if embedding is not None:
        parts.insert(0, Embedding(*embedding, width))
    if vocabulary is not None:
        parts.append(Unembedding(vocabulary, width))
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)
