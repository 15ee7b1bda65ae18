"""Greedy decoding and BLEU."""

import sys

import pytest
import torch
from torch import nn

from stretto.data.translation import BEGIN, END
from stretto.errors import UsageError
from stretto.models.encoder_decoder import find_bleu, greedy, score

UP = 3  # a stand-in's rule: each token is the source's at this place, and UP


class Copy(nn.Module):
    """Says the source's token of each position + UP, then END; it insists on having read what it said before."""

    def forward(self, x):
        source, read = x.unbind(1)
        said = torch.where(source > 0, source + UP, END)
        reads = torch.cat([torch.full_like(read[:, :1], BEGIN), said[:, :-1]], 1)
        wrong = (read != reads).cumsum(1) > 0
        return nn.functional.one_hot(torch.where(wrong, 0, said), 20).float()


SOURCE = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0]])


def test_each_token_is_read_before_the_next():
    said = greedy(Copy(), SOURCE)
    assert said[0].tolist() == [8, 9, 10, END]
    assert said[1, :2].tolist() == [11, END]


def test_nothing_behind_the_end_is_compared():
    compared = []

    def bleu(said, wanted):
        compared.append((said, wanted))
        return 7.0

    y = torch.tensor([[8, 9, 10, END], [4, END, -100, -100]])
    model = Copy().train()
    assert score(model, torch.stack([SOURCE, SOURCE], 1), y, lambda tokens: str(list(tokens)), bleu) == 7.0
    assert compared == [(["[8, 9, 10]", "[11]"], ["[8, 9, 10]", "[4]"])]
    assert model.training


def test_bleu_is_that_of_sacrebleu():
    bleu = find_bleu()
    sentence = "the quick brown fox jumps over the lazy dog"
    assert bleu([sentence], [sentence]) == pytest.approx(100)
    assert bleu(["a b c d"], ["e f g h"]) == pytest.approx(0)
    # Precisions 4/5, 3/4, 2/3, 1/2 and no brevity penalty: the geometric mean is (1/5)^(1/4).
    assert bleu(["a b c d e"], ["a b c d f"]) == pytest.approx(100 * 0.2**0.25)


def test_without_sacrebleu_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UsageError, match=r"sacrebleu .* is not installed: pip install sacrebleu, or .*translation"):
        find_bleu()
