"""A transformer that translates (Vaswani et al. 2017): pre-norm, learned positions, no tied weights.

Blocks pass on what they do not change: encoder blocks the mask of the source and the decoder's tokens, decoder blocks
the mask and the memory (the encoder's output). So the network is a sequence of blocks, each of which may be a stage.

Shapes: h, x and memory [N, T, width]; mask [N, T], bool, True where the source has a token; tokens int64 [N, T].
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from stretto.data import Dataset
from stretto.data.translation import BEGIN, END, PAD
from stretto.errors import UsageError
from stretto.models.model import Recipe
from stretto.models.transformer import (
    CausalAttention,
    Embedding,
    Unembedding,
    check_heads,
    initialise,
    mlp,
    unembedding,
)
from stretto.nn.chain import Chain
from stretto.nn.preserve import evaluating
from stretto.options.named import choose


def encoder_decoder(
    dataset: Dataset, *, depth: int = 6, width: int = 64, heads: int = 4, cut: str = "blocks"
) -> Recipe:
    """`depth` blocks of an encoder and as many of a decoder, pairs [N, 2, T] -> ... -> logits [N, T, V].

    x[:, 0] is the source, x[:, 1] the decoder's input. The first block of each side also holds its embedding, that of
    the decoder also the encoder's last normalisation, the last block the unembedding. 12 blocks are those of Yang et
    al. 2021 (PipeMare). cut: "blocks"; or "layers", the same network with every layer that has weights by itself,
    15 depth + 5 of them, where an attention is two layers: query, key and value, and the output. That cut is ours.
    """
    check_heads("encoder-decoder", width, heads)
    choose("model 'encoder-decoder'", "cut", cut, ("blocks", "layers"))
    vocabulary, context = dataset.num_classes, dataset.train.x.shape[2]
    if cut == "layers":
        return _layers(vocabulary, context, depth=depth, width=width, heads=heads)
    encoder: list[Recipe] = [[partial(EncoderBlock, width, heads, depth)] for _ in range(depth)]
    decoder: list[Recipe] = [[partial(DecoderBlock, width, heads, depth)] for _ in range(depth)]
    encoder[0].insert(0, partial(SourceEmbedding, vocabulary, context, width))
    decoder[0].insert(0, partial(DecoderInput, vocabulary, context, width))
    decoder[-1].append(partial(Logits, vocabulary, width))
    return [partial(_block, makes) for makes in encoder + decoder]


class SourceEmbedding(nn.Module):
    """Tokens [N, 2, T] -> (h, mask, tokens): the source embedded, its mask, and the decoder's tokens."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, context, width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source, target = tokens.unbind(1)
        return self.embedding(source), source != PAD, target


class DecoderInput(nn.Module):
    """(h, mask, tokens) -> (tokens embedded, memory, mask); the memory is h, normalised."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.embedding = Embedding(vocabulary, context, width)

    def forward(self, h: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise the encoder's output, and embed the decoder's tokens."""
        return self.embedding(tokens), self.norm(h), mask


class Logits(nn.Module):
    """(h, memory, mask) -> logits [N, T, V]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.unembedding = Unembedding(vocabulary, width)

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.unembedding(h)
        return logits


class Attention(nn.Module):
    """Attention from x [N, T, width] to the memory [N, S, width] -> [N, T, width].

    If not `whole`, the output layer is left to another module.
    """

    def __init__(self, width: int, heads: int, *, whole: bool = True) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width) if whole else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attend to the positions of the memory where mask [N, S] is True."""
        query, key, value = (
            projected.unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for projected in (self.query(x), self.key(memory), self.value(memory))
        )
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)); (h, mask, tokens) -> the same."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)
        initialise(self, ("attention.output", "mlp.2"), depth)

    def forward(self, h: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed = self.attention_norm(h)
        h = h + self.attention(normed, normed, mask)
        return h + self.mlp(self.mlp_norm(h)), mask, tokens


class DecoderBlock(nn.Module):
    """Causal attention, attention to the memory, mlp; (h, memory, mask) -> the same."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.cross = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)
        initialise(self, ("attention.output", "cross.output", "mlp.2"), depth)

    def forward(self, h: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The target needs no mask: its padding comes last, and no token attends to later ones."""
        h = h + self.attention(self.attention_norm(h))
        h = h + self.cross(self.cross_norm(h), memory, mask)
        return h + self.mlp(self.mlp_norm(h)), memory, mask


class BranchStart(nn.Module):
    """(h, ...) -> (h normalised, h, ...): a branch leaves the residual stream h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self.norm(h), h, *others


class OnFirst(nn.Module):
    """(x, ...) -> (layer(x), ...): a layer on the first tensor."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()
        initialise(self, (), 1)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x), *others


class BranchEnd(nn.Module):
    """(x, h, ...) -> (h + linear(x), ...): one of `branches` that are added to the residual stream."""

    def __init__(self, inputs: int, width: int, branches: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, width)
        initialise(self, ("layer",), branches)

    def forward(self, x: Tensor, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return h + self.layer(x), *others


class AttentionLayer(nn.Module):
    """(x, h, mask, ...) -> (attention of x to itself, h, mask, ...).

    With `across` (x, h, memory, mask) -> (attention of x to the memory, h, memory, mask).
    """

    def __init__(self, width: int, heads: int, *, across: bool) -> None:
        super().__init__()
        self.across = across
        self.attention = Attention(width, heads, whole=False)
        initialise(self, (), 1)

    def forward(self, x: Tensor, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        memory, mask = others if self.across else (x, others[0])
        return self.attention(x, memory, mask), h, *others


class TargetEmbedding(nn.Module):
    """(memory, mask, tokens) -> (tokens embedded, memory, mask)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, context, width)

    def forward(self, memory: Tensor, mask: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.embedding(tokens), memory, mask


class FinalLayer(nn.Module):
    """(h normalised, memory, mask) -> logits [N, T, V]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.score = unembedding(vocabulary, width)

    def forward(self, normed: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """The logits at every position; the source is no longer needed."""
        logits: Tensor = self.score(normed)
        return logits


def _layers(vocabulary: int, context: int, *, depth: int, width: int, heads: int) -> Recipe:
    def attention(branches: int, mix: Callable[[], nn.Module]) -> Recipe:
        return [partial(BranchStart, width), mix, partial(BranchEnd, width, width, branches)]

    def feedforward(branches: int) -> Recipe:
        return [partial(BranchStart, width), partial(OnFirst, widened), partial(BranchEnd, 4 * width, width, branches)]

    widened = partial(_widened, width)
    norm = partial(OnFirst, partial(nn.LayerNorm, width))
    itself, across = (partial(AttentionLayer, width, heads, across=across) for across in (False, True))
    past = partial(OnFirst, partial(CausalAttention, width, heads, whole=False))
    encoder = attention(2 * depth, itself) + feedforward(2 * depth)
    decoder = attention(3 * depth, past) + attention(3 * depth, across) + feedforward(3 * depth)
    begin: Recipe = [norm, partial(TargetEmbedding, vocabulary, context, width)]
    end: Recipe = [norm, partial(FinalLayer, vocabulary, width)]
    return [partial(SourceEmbedding, vocabulary, context, width), *encoder * depth, *begin, *decoder * depth, *end]


def _widened(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())


def _block(makes: Recipe) -> nn.Module:
    parts = [make() for make in makes]
    return parts[0] if len(parts) == 1 else Chain(*parts)


Text = Callable[[Sequence[int]], str]
Bleu = Callable[[Sequence[str], Sequence[str]], float]
"""(translations, references) -> BLEU of the whole corpus, from 0 to 100."""


def find_bleu() -> Bleu:
    """BLEU as sacrebleu (Post 2018) computes it. Raises UsageError if that is not installed."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError as error:
        raise UsageError(
            "translations are scored by BLEU, which the package sacrebleu computes, and it is not installed: "
            'pip install sacrebleu, or "stretto[translation]"'
        ) from error
    return lambda translations, references: float(corpus_bleu(list(translations), [list(references)]).score)


@torch.no_grad()
def greedy(model: nn.Module, source: Tensor) -> Tensor:
    """Translate source int64 [N, T] into tokens int64 [N, T], always taking the most likely next token.

    Tokens behind the first END of a row mean nothing. The model maps [N, 2, T] to logits [N, T, V], as
    `models.encoder_decoder` does.
    """
    inputs, tokens = torch.full_like(source, PAD), torch.full_like(source, PAD)
    inputs[:, 0] = BEGIN
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for position in range(source.shape[1]):
        tokens[:, position] = model(torch.stack([source, inputs], dim=1))[:, position].argmax(-1)
        ended |= tokens[:, position] == END
        if ended.all():
            break
        inputs[:, position + 1 : position + 2] = tokens[:, position : position + 1]
    return tokens


def score(model: nn.Module, x: Tensor, y: Tensor, text: Text, bleu: Bleu) -> float:
    """BLEU of the translations of x int64 [N, 2, T] against y int64 [N, T]; `text` turns tokens into sentences."""
    with evaluating([model]):
        translated = greedy(model, x[:, 0])
    translations, references = (
        [text(row[: row.index(END)] if END in row else row) for row in tokens.tolist()] for tokens in (translated, y)
    )
    return bleu(translations, references)
