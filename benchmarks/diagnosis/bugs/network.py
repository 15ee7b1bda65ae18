"""A tiny GPT-2, and eight rows whose ends are padding."""

from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (16, 4, 9, 3, 16, 12, 5, 7)


def build() -> nn.Module:
    """The model; the same in every version of transformers, but for how it draws its weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    return model


def batch() -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and labels of a step."""
    tokens = torch.randint(0, 97, (8, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for row, length in enumerate(LENGTHS):
        labels[row, length:] = -100
    return {"input_ids": tokens}, labels
