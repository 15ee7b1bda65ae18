"""Greedy translation with an encoder-decoder, and its score: BLEU (Papineni et al. 2002)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stretto.data.translation import BEGIN, END, PAD
from stretto.errors import UsageError
from stretto.nn.preserve import evaluating

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
    translations, references = ([text(until_end(row)) for row in tokens.tolist()] for tokens in (translated, y))
    return bleu(translations, references)


def until_end(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens before the first END; all tokens if there is none."""
    return tokens[: tokens.index(END)] if END in tokens else tokens
