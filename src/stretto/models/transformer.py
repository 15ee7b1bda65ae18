"""A decoder-only language model: pre-norm, causal attention, learned or rotary positions."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.models.model import Recipe
from stretto.options.named import choose


def transformer(
    dataset: Dataset, *, depth: int = 4, width: int = 64, heads: int = 4, positions: str = "learned"
) -> Recipe:
    """`depth` blocks of attention and MLP, tokens [N, T] -> [N, T, width] -> ... -> logits [N, T, V].

    The first block also holds the embedding, the last one also the final normalisation and the unembedding, which are
    not tied: tied weights would join the two ends of the pipeline. positions: learned, added to the embedding; or
    rotary, in each attention.
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
    """Refuse heads that do not divide the width."""
    if width % heads:
        fitting = [h for h in range(1, width + 1) if width % h == 0]
        raise UsageError(
            f"model {model!r}: heads={heads} does not divide width={width}; "
            f"take heads={min(fitting, key=lambda h: abs(h - heads))}, or width={-(-width // heads) * heads}"
        )


def language_model(vocabulary: int, context: int, *, depth: int, width: int, heads: int) -> Recipe:
    """The same network without data, in finer layers: the embedding, `depth` blocks, the unembedding."""
    block = partial(Block, width, heads, depth)
    return [partial(Embedding, vocabulary, context, width), *[block] * depth, partial(Unembedding, vocabulary, width)]


class Embedding(nn.Module):
    """Tokens int64 [N, T] -> [N, T, width]: what the token is plus where it stands, for T up to `context`.

    Without a context, where it stands is not said.
    """

    def __init__(self, vocabulary: int, context: int | None, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.token.weight, std=0.1)
        self.position = None if context is None else nn.Embedding(context, width)
        if self.position is not None:
            nn.init.normal_(self.position.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any length up to the context."""
        embedded: Tensor = self.token(tokens)
        if self.position is None:
            return embedded
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise UsageError(f"{length} tokens exceed the context of {context} that the transformer was built for")
        return embedded + self.position.weight[:length]


class CausalAttention(nn.Module):
    """Each token looks at itself and those before it, [N, T, width] -> [N, T, width].

    Query, key and value are layers of their own, and the number of heads is read off their output: a process that
    holds the rows of some heads only runs this same forward. `rotary` positions turn queries and keys. Where it is not
    `whole`, its output layer is somebody else's.
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
        """Mix the values of the tokens up to each one."""
        query, key, value = (
            layer(x).unflatten(2, (-1, self.head_width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.rotary:
            query, key = turned(query), turned(key)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


def turned(x: Tensor) -> Tensor:
    """[N, heads, T, d] with pair i of each token, (i, i + d/2), turned by token * 10000^(-2i/d) (Su et al. 2021)."""
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
        draw(self, ("attention.output", "mlp.2"), depth)

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def mlp(width: int) -> nn.Sequential:
    """What follows attention in a block."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def draw(block: nn.Module, writers: Sequence[str], depth: int) -> None:
    """Draw the weights of a block's Linear layers.

    Those that write into the residual stream share its variance with those of all `depth` blocks.
    """
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            shared = len(writers) * depth if name in writers else 1
            nn.init.normal_(module.weight, std=(module.in_features * shared) ** -0.5)
            nn.init.zeros_(module.bias)


def scoring(vocabulary: int, width: int) -> nn.Linear:
    """The layer that scores every token of the vocabulary."""
    score = nn.Linear(width, vocabulary, bias=False)
    nn.init.normal_(score.weight, std=0.02)
    return score


class Unembedding(nn.Module):
    """Normalise and score every token of the vocabulary, [N, T, width] -> logits [N, T, V]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = scoring(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        """Score the tokens that may come next."""
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
