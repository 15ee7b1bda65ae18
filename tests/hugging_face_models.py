"""Hugging Face models from configurations, tiny and with random weights, and batches for them."""

import torch

import stretto
from late_imports import Late

transformers = Late("transformers")

WORDS, LENGTH = 61, 10
WIDE = {"initializer_range": 0.2}  # so that every weight matters
TEXT = {"vocab_size": WORDS, "num_hidden_layers": 4, "max_position_embeddings": 16, **WIDE}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
GPT2 = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 16, **WIDE}
DROPLESS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def build(kind, **options):
    transformers.logging.set_verbosity_error()  # small vocabularies lack the special tokens that configurations name
    torch.manual_seed(3)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **{**DROPLESS, **options}))
    if kind == "llama":
        config = transformers.LlamaConfig(**TEXT, **SMALL, num_key_value_heads=2, **options)
        return transformers.LlamaForCausalLM(config)
    if kind == "bert":
        config = transformers.BertConfig(**TEXT, **SMALL, num_labels=3, **options)
        return transformers.BertForSequenceClassification(config)
    assert kind == "vit"
    image = {"image_size": 16, "patch_size": 4, "num_labels": 3, "num_hidden_layers": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, **image, **options))


def words(number, examples=6, length=LENGTH):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(WORDS, (examples, length), generator=generator)


def padding(examples=6, length=LENGTH):
    """Which words count: the last ones of the first two texts do not."""
    mask = torch.ones(examples, length, dtype=torch.long)
    mask[0, 7:] = mask[1, 4:] = 0
    return mask


def images(number, examples=6):
    return torch.randn(examples, 3, 16, 16, generator=torch.Generator().manual_seed(number))


@stretto.mean  # without padding
def next_word(logits, target):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
