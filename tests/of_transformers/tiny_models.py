"""Tiny models of each kind from configurations, their data, and arguments that touch much of TrainingArguments."""

import warnings
from functools import partial

import torch

from habits.language_models import KINDS
from late_imports import Late

transformers = Late("transformers")

WORDS, LENGTH = 61, 10
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 32, "initializer_range": 0.2, **ENDS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(dropout=0.0):
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2, **ENDS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **BLOCKS, num_key_value_heads=2))


def lora(layers=None):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False,
                        layers_to_transform=layers)  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)  # peft's call
        return get_peft_model(llama(), config)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, **BLOCKS, **NO_DROPOUT))


def classifier():
    config = transformers.BertConfig(**TEXT, **BLOCKS, **NO_DROPOUT, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def vit():
    config = transformers.ViTConfig(**BLOCKS, **NO_DROPOUT, image_size=8, patch_size=4, num_labels=3)
    return transformers.ViTForImageClassification(config)


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, **ENDS,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
        init_std=0.2, forced_eos_token_id=None, decoder_start_token_id=2, **ENDS,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def other(name, **options):
    """Another architecture, without dropout."""
    kind = KINDS[name]
    config = getattr(transformers, kind.config)(**{**kind.options, **options})
    for each in vars(config):
        if each in DROPOUTS:
            setattr(config, each, 0.0)
    return getattr(transformers, kind.model)(config)


DROPOUTS = {"dropout", "attention_dropout", "hidden_dropout", "activation_dropout", *NO_DROPOUT}
OTHERS = {"OPT": {}, "GPT-NeoX": {}, "Qwen3": {}, "Mamba, state space": {}, "DistilBERT": {}, "Mixtral, experts": {}}
SLOW = ("bart", "t5", "vit", "classifier", "bert", "llama", *OTHERS)
MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "lora": lora,
    "bert": bert,
    "classifier": classifier,
    "vit": vit,
    "t5": t5,
    "bart": bart,
    **{name: partial(other, name, **options) for name, options in OTHERS.items()},
}


def build(kind, **options):
    transformers.logging.set_verbosity_error()  # tiny vocabularies lack the special tokens that configurations name
    torch.manual_seed(3)
    return MODELS[kind](**options)


class Examples(torch.utils.data.Dataset):
    """Examples of a kind, the same ones each time."""

    def __init__(self, kind, number=24, seed=5):
        self.kind, self.number, self.seed = kind, number, seed

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        if index >= self.number:
            raise IndexError(index)
        drawn = torch.Generator().manual_seed(1000 * self.seed + int(index))
        if self.kind == "vit":
            return {"pixel_values": torch.randn(3, 8, 8, generator=drawn), "labels": index % 3}
        ids = torch.randint(3, WORDS, (LENGTH,), generator=drawn)
        if self.kind == "classifier":
            return {"input_ids": ids, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": index % 3}
        mask, labels = torch.ones(LENGTH, dtype=torch.long), ids.clone()
        end = LENGTH - index % 4  # some are padded
        ids, mask = ids.clone(), mask.clone()
        ids[end:], mask[end:], labels[end:] = 0, 0, -100
        if self.kind in ("bert", "DistilBERT"):
            hidden = torch.rand(LENGTH, generator=drawn) < 0.4
            hidden[0] = True
            labels = torch.where(hidden, labels, -100)
            ids = torch.where(hidden, torch.where(mask.bool(), 3, ids), ids)
        if self.kind in ("t5", "bart"):
            labels = labels[:7]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(folder, **options):
    """`adam_epsilon`: key biases have no gradient but rounding errors, which must not be scaled up to whole steps."""
    usual = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2,
        "weight_decay": 0.1, "warmup_steps": 2, "adam_epsilon": 1e-3, "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**usual, **options})
