"""A transformer that translates (Vaswani et al. 2017): pre-norm, learned positions, nothing tied.

What a block does not change it passes on: an encoder's which source tokens count and the decoder's tokens, a decoder's
what the encoder made of the source. So the network is a row of blocks, and each may be a stage.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from stretto.data import Dataset
from stretto.data.translation import PAD
from stretto.models.model import Recipe
from stretto.models.transformer import CausalAttention, Embedding, Unembedding, check_heads, draw, mlp, scoring
from stretto.nn.chain import Chain
from stretto.options.named import choose


def encoder_decoder(
    dataset: Dataset, *, depth: int = 6, width: int = 64, heads: int = 4, cut: str = "blocks"
) -> Recipe:
    """`depth` blocks of an encoder and as many of a decoder, pairs [N, 2, T] -> ... -> logits [N, T, V].

    x[:, 0] is the source, x[:, 1] what the decoder reads. The first block of each side also holds its embedding, the
    decoder's the encoder's last normalisation, the last block the unembedding. 12 blocks are those of Yang et al. 2021
    (PipeMare). cut: blocks; or layers, the same network with all that has weights by itself, 15 depth + 5 of them,
    where an attention is two: what it reads with, and its output. That cut is ours.
    """
    check_heads("encoder-decoder", width, heads)
    choose("model 'encoder-decoder'", "cut", cut, ("blocks", "layers"))
    vocabulary, context = dataset.num_classes, dataset.train.x.shape[2]
    if cut == "layers":
        return _layers(vocabulary, context, depth=depth, width=width, heads=heads)
    encoder: list[Recipe] = [[partial(EncoderBlock, width, heads, depth)] for _ in range(depth)]
    decoder: list[Recipe] = [[partial(DecoderBlock, width, heads, depth)] for _ in range(depth)]
    encoder[0].insert(0, partial(Source, vocabulary, context, width))
    decoder[0].insert(0, partial(Begin, vocabulary, context, width))
    decoder[-1].append(partial(End, vocabulary, width))
    return [partial(_block, makes) for makes in encoder + decoder]


class Source(nn.Module):
    """[N, 2, T] -> (the source embedded [N, T, width], which of its tokens count [N, T], the decoder's tokens)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, context, width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Part source and target, and embed one."""
        source, target = tokens.unbind(1)
        return self.embedding(source), source != PAD, target


class Begin(nn.Module):
    """(h, counts, tokens) -> (the tokens embedded [N, T, width], h normalised: the memory, counts)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.embedding = Embedding(vocabulary, context, width)

    def forward(self, h: Tensor, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """End the encoder, begin the decoder."""
        return self.embedding(tokens), self.norm(h), counts


class End(nn.Module):
    """(h, memory, counts) -> logits [N, T, V]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.unembedding = Unembedding(vocabulary, width)

    def forward(self, h: Tensor, memory: Tensor, counts: Tensor) -> Tensor:
        """Score the tokens; the source is no longer needed."""
        logits: Tensor = self.unembedding(h)
        return logits


class Attention(nn.Module):
    """Each position of x looks at those of the memory that count, [N, T, width] and [N, S, width] -> [N, T, width].

    Where it is not `whole`, its output layer is somebody else's.
    """

    def __init__(self, width: int, heads: int, *, whole: bool = True) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width) if whole else nn.Identity()

    def forward(self, x: Tensor, memory: Tensor, counts: Tensor) -> Tensor:
        """Mix the values of what counts [N, S], bool."""
        query, key, value = (
            made.unflatten(2, (-1, self.head_width)).transpose(1, 2)
            for made in (self.query(x), self.key(memory), self.value(memory))
        )
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=counts[:, None, None])
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class EncoderBlock(nn.Module):
    """h + attention(norm(h)), then h + mlp(norm(h)); (h, counts, tokens) to the same."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)
        draw(self, ("attention.output", "mlp.2"), depth)

    def forward(self, h: Tensor, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every source token looks at every other."""
        normed = self.attention_norm(h)
        h = h + self.attention(normed, normed, counts)
        return h + self.mlp(self.mlp_norm(h)), counts, tokens


class DecoderBlock(nn.Module):
    """Attention to the tokens so far, attention to the memory, mlp; (h, memory, counts) to the same."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads)
        self.cross_norm = nn.LayerNorm(width)
        self.cross = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp(width)
        draw(self, ("attention.output", "cross.output", "mlp.2"), depth)

    def forward(self, h: Tensor, memory: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Padding of the target comes last, and no token looks ahead: it needs no mask."""
        h = h + self.attention(self.attention_norm(h))
        h = h + self.cross(self.cross_norm(h), memory, counts)
        return h + self.mlp(self.mlp_norm(h)), memory, counts


class Aside(nn.Module):
    """(h, ...) -> (h normalised, h, ...): here a branch leaves the residual stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Begin a branch."""
        return self.norm(h), h, *others


class Onward(nn.Module):
    """(x, ...) -> (a layer of x, ...)."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()
        draw(self, (), 1)

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Go on with the first."""
        return self.layer(x), *others


class Back(nn.Module):
    """(x, h, ...) -> (h + a linear layer of x, ...): one of `branches` that come back to the residual stream."""

    def __init__(self, inputs: int, width: int, branches: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, width)
        draw(self, ("layer",), branches)

    def forward(self, x: Tensor, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """End a branch."""
        return h + self.layer(x), *others


class Look(nn.Module):
    """(x, h, counts, ...) or, `across`, (x, h, memory, counts) -> (what attention mixes for x, and all but x)."""

    def __init__(self, width: int, heads: int, *, across: bool) -> None:
        super().__init__()
        self.across = across
        self.attention = Attention(width, heads, whole=False)
        draw(self, (), 1)

    def forward(self, x: Tensor, h: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Look at itself or at the memory."""
        memory, counts = others if self.across else (x, others[0])
        return self.attention(x, memory, counts), h, *others


class Target(nn.Module):
    """(memory, counts, tokens) -> (the tokens embedded, memory, counts)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, context, width)

    def forward(self, memory: Tensor, counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Begin the decoder."""
        return self.embedding(tokens), memory, counts


class Score(nn.Module):
    """(h normalised, memory, counts) -> logits [N, T, V]."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.score = scoring(vocabulary, width)

    def forward(self, normed: Tensor, memory: Tensor, counts: Tensor) -> Tensor:
        """Score the tokens; the source is no longer needed."""
        logits: Tensor = self.score(normed)
        return logits


def _layers(vocabulary: int, context: int, *, depth: int, width: int, heads: int) -> Recipe:
    def attention(branches: int, mix: Callable[[], nn.Module]) -> Recipe:
        return [partial(Aside, width), mix, partial(Back, width, width, branches)]

    def feedforward(branches: int) -> Recipe:
        return [partial(Aside, width), partial(Onward, widened), partial(Back, 4 * width, width, branches)]

    widened = partial(_widened, width)
    norm = partial(Onward, partial(nn.LayerNorm, width))
    itself, across = (partial(Look, width, heads, across=across) for across in (False, True))
    past = partial(Onward, partial(CausalAttention, width, heads, whole=False))
    encoder = attention(2 * depth, itself) + feedforward(2 * depth)
    decoder = attention(3 * depth, past) + attention(3 * depth, across) + feedforward(3 * depth)
    begin: Recipe = [norm, partial(Target, vocabulary, context, width)]
    end: Recipe = [norm, partial(Score, vocabulary, width)]
    return [partial(Source, vocabulary, context, width), *encoder * depth, *begin, *decoder * depth, *end]


def _widened(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())


def _block(makes: Recipe) -> nn.Module:
    parts = [make() for make in makes]
    return parts[0] if len(parts) == 1 else Chain(*parts)
