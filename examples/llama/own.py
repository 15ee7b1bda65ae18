"""A Llama-shaped language model of Hugging Face's on plain text, with a tokenizer of its own (one token a character).

The folder of train.txt, validation.txt and test.txt is an option: `--data-options.path FOLDER`.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # whatever else there is becomes a blank


def tokens(text: str) -> Tensor:
    """A token for each character."""
    places = {character: index for index, character in enumerate(CHARACTERS)}
    return torch.tensor([places.get(character, 1) for character in text])


def data(path: str = "text", context: int = 64, characters: int = 400_000) -> tuple[tuple[Tensor, Tensor], ...]:
    """Pieces of `context` tokens, and the tokens that follow each."""
    parts = []
    for name in ("train", "validation", "test"):
        text = (Path(path) / f"{name}.txt").read_text(encoding="utf-8")[: characters if name == "train" else 40_000]
        ids = tokens(text)
        rows = (len(ids) - 1) // context
        parts.append((ids[: rows * context].view(rows, context), ids[1 : rows * context + 1].view(rows, context)))
    return tuple(parts)


def build(width: int = 64, layers: int = 4) -> nn.Module:
    """transformers.LlamaForCausalLM, as it is; needs the package transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)
