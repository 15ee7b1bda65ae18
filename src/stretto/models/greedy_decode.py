"""Translations by a trained encoder-decoder, and how good they are: BLEU (Papineni et al. 2002)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stretto.data.translation import BEGIN, END, PAD
from stretto.errors import UsageError
from stretto.nn.preserve import evaluating

Text = Callable[[Sequence[int]], str]
Bleu = Callable[[Sequence[str], Sequence[str]], float]
"""(translations, those that are wanted) -> BLEU of the whole corpus, from 0 to 100."""


def find_bleu() -> Bleu:
    """sacrebleu's (Post 2018). Raises UsageError where it is not installed."""
    try:
        from sacrebleu import corpus_bleu
    except ImportError as error:
        raise UsageError(
            "translations are scored by BLEU, which the package sacrebleu computes, and it is not installed: "
            'pip install sacrebleu, or "stretto[translation]"'
        ) from error
    return lambda said, wanted: float(corpus_bleu(list(said), [list(wanted)]).score)


@torch.no_grad()
def greedy(model: nn.Module, source: Tensor) -> Tensor:
    """The likeliest next token, one after the other: source [N, T] -> tokens [N, T], of use up to the first END.

    The model takes [N, 2, T] and gives logits [N, T, V], as `models.encoder_decoder` does.
    """
    read, said = torch.full_like(source, PAD), torch.full_like(source, PAD)
    read[:, 0] = BEGIN
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for position in range(source.shape[1]):
        said[:, position] = model(torch.stack([source, read], dim=1))[:, position].argmax(-1)
        ended |= said[:, position] == END
        if ended.all():
            break
        read[:, position + 1 : position + 2] = said[:, position : position + 1]
    return said


def score(model: nn.Module, x: Tensor, y: Tensor, text: Text, bleu: Bleu) -> float:
    """BLEU of what the model makes of x [N, 2, T], compared with y [N, T]; `text` writes tokens as sentences."""
    with evaluating([model]):
        said = greedy(model, x[:, 0])
    sentences = [[text(until_end(row)) for row in tokens.tolist()] for tokens in (said, y)]
    return bleu(*sentences)


def until_end(tokens: Sequence[int]) -> Sequence[int]:
    """The tokens before the first END; all where there is none."""
    return tokens[: tokens.index(END)] if END in tokens else tokens
