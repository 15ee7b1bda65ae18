"""A Llama-shaped language model of Hugging Face's on plain text, with a tokenizer that is trained on it.

The folder of train.txt, validation.txt and test.txt is an option: `--data-options.path FOLDER`.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

VOCABULARY = 1000
TOKENIZER = Path(__file__).with_name("tokenizer.json")  # trained once, then used again


def tokenizer(train: Path) -> Tokenizer:
    """Byte pairs learned from the train text; the same text gives the same file."""
    if not TOKENIZER.is_file():
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train(
            [str(train)], trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        )
        unfinished = TOKENIZER.with_suffix(".unfinished")
        made.save(str(unfinished))
        unfinished.replace(TOKENIZER)
    return Tokenizer.from_file(str(TOKENIZER))


def data(path: str = "text", context: int = 64, characters: int = 1_000_000) -> list[tuple[Tensor, Tensor]]:
    """Pieces of `context` tokens from the first characters of each text, and the tokens that follow each."""
    encoding = tokenizer(Path(path) / "train.txt")
    parts = []
    for name in ("train", "validation", "test"):
        text = (Path(path) / f"{name}.txt").read_text(encoding="utf-8")[: characters if name == "train" else 60_000]
        ids = torch.tensor(encoding.encode(text).ids)
        rows = (len(ids) - 1) // context
        parts.append((ids[: rows * context].view(rows, context), ids[1 : rows * context + 1].view(rows, context)))
    return parts


def build(width: int = 64, layers: int = 4) -> nn.Module:
    """transformers.LlamaForCausalLM, as it is."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)
