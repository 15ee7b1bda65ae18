"""Architectures of transformers from their configurations, tiny, with their own dropouts, and batches for them."""

from dataclasses import dataclass

import torch

from late_imports import Late

transformers = Late("transformers")

WORDS, LENGTH, SHORT, CLASSES = 61, 8, 6, 5
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = {"initializer_range": 0.2}  # so that every weight matters
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 32, **WIDE, **ENDS}
BLOCKS = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24}
GROUPED = {**TEXT, **BLOCKS, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 4}
EXPERTS = {"experts_implementation": "eager"}  # the other one takes no float64
ENCODER = {**TEXT, **BLOCKS}
IMAGES = {**BLOCKS, **WIDE, "image_size": 8, "patch_size": 4, "num_labels": CLASSES}


@dataclass(frozen=True)
class Kind:
    """A model class, its configuration, and its task: "causal", "masked", "classes", "pairs" or "images"."""

    model: str
    config: str
    options: dict
    task: str = "causal"
    blocks: str = ""  # the list of blocks, where all gradients pass through each block's output and no weight is tied


KINDS = {
    "GPT-2": Kind(
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": WORDS, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 32, **WIDE, **ENDS},
    ),
    "Llama": Kind("LlamaForCausalLM", "LlamaConfig", GROUPED, blocks="model.layers"),
    "OPT": Kind("OPTForCausalLM", "OPTConfig", {**TEXT, "hidden_size": 16, "num_hidden_layers": 4, "ffn_dim": 24,
                                                "num_attention_heads": 4, "word_embed_proj_dim": 16, "init_std": 0.2}),
    "Mistral": Kind("MistralForCausalLM", "MistralConfig", {**HEADS, "sliding_window": 4}, blocks="model.layers"),
    "Qwen2": Kind("Qwen2ForCausalLM", "Qwen2Config", GROUPED, blocks="model.layers"),
    "Qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config", HEADS, blocks="model.layers"),
    "GPT-NeoX": Kind("GPTNeoXForCausalLM", "GPTNeoXConfig",
                     {**ENCODER, "attention_dropout": 0.1, "hidden_dropout": 0.1}, blocks="gpt_neox.layers"),
    "Phi": Kind("PhiForCausalLM", "PhiConfig", {**GROUPED, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
                blocks="model.layers"),
    "Gemma": Kind("GemmaForCausalLM", "GemmaConfig", HEADS),
    "Gemma 2": Kind("Gemma2ForCausalLM", "Gemma2Config", {**HEADS, "query_pre_attn_scalar": 4, "sliding_window": 4}),
    "Gemma 3": Kind("Gemma3ForCausalLM", "Gemma3TextConfig",
                    {**HEADS, "query_pre_attn_scalar": 4, "sliding_window": 4}),
    "BLOOM": Kind("BloomForCausalLM", "BloomConfig", {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 4, "n_head": 4,
                                                      "hidden_dropout": 0.1, **WIDE, **ENDS}),
    "Falcon": Kind("FalconForCausalLM", "FalconConfig", {**ENCODER, "hidden_dropout": 0.1, "ffn_hidden_size": 24}),
    "Mixtral, experts": Kind("MixtralForCausalLM", "MixtralConfig", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "Qwen2-MoE, experts": Kind("Qwen2MoeForCausalLM", "Qwen2MoeConfig",
                               {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                                "shared_expert_intermediate_size": 8, **EXPERTS}),
    "Mamba, state space": Kind("MambaForCausalLM", "MambaConfig",
                               {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, **WIDE,
                                **ENDS}),
    "BERT": Kind("BertForMaskedLM", "BertConfig", ENCODER, "masked"),
    "BERT, classes": Kind("BertForSequenceClassification", "BertConfig", {**ENCODER, "num_labels": CLASSES}, "classes",
                          "bert.encoder.layer"),
    "RoBERTa": Kind("RobertaForMaskedLM", "RobertaConfig", ENCODER, "masked"),
    "DistilBERT": Kind("DistilBertForMaskedLM", "DistilBertConfig",
                       {**TEXT, "dim": 16, "n_layers": 4, "n_heads": 4, "hidden_dim": 24}, "masked"),
    "ELECTRA": Kind("ElectraForMaskedLM", "ElectraConfig", {**ENCODER, "embedding_size": 8}, "masked"),
    "ALBERT, one block for all": Kind("AlbertForMaskedLM", "AlbertConfig",
                                      {**ENCODER, "embedding_size": 8, "hidden_dropout_prob": 0.1}, "masked"),
    "DeBERTa": Kind("DebertaV2ForMaskedLM", "DebertaV2Config",
                    {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "masked"),
    "T5": Kind("T5ForConditionalGeneration", "T5Config",
               {"vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
                "decoder_start_token_id": 0, **ENDS}, "pairs"),
    "BART": Kind("BartForConditionalGeneration", "BartConfig",
                 {"vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
                  "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
                  "decoder_ffn_dim": 24, "max_position_embeddings": 32, "init_std": 0.2, "forced_eos_token_id": None,
                  "decoder_start_token_id": 2, **ENDS}, "pairs"),
    "ViT": Kind("ViTForImageClassification", "ViTConfig",
                {**IMAGES, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}, "images",
                "vit.layers"),
    "DeiT": Kind("DeiTForImageClassification", "DeiTConfig", {**IMAGES, "hidden_dropout_prob": 0.1}, "images"),
    "BEiT": Kind("BeitForImageClassification", "BeitConfig", {**IMAGES, "drop_path_rate": 0.2}, "images"),
    "DINOv2": Kind("Dinov2ForImageClassification", "Dinov2Config", {**IMAGES, "drop_path_rate": 0.2}, "images"),
    "ConvNeXt": Kind("ConvNextForImageClassification", "ConvNextConfig",
                     {"hidden_sizes": [4, 6, 8, 8], "depths": [1, 1, 2, 1], "patch_size": 1, "image_size": 8,
                      "num_labels": CLASSES, "drop_path_rate": 0.2, **WIDE}, "images"),
    "ResNet": Kind("ResNetForImageClassification", "ResNetConfig",
                   {"embedding_size": 4, "hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1], "num_labels": CLASSES,
                    "layer_type": "basic"}, "images"),
    "Swin": Kind("SwinForImageClassification", "SwinConfig",
                 {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                  "window_size": 2, "num_labels": CLASSES, "drop_path_rate": 0.2, **WIDE}, "images"),
}  # fmt: skip


def network(name, seed=0):
    """A model in float64, in training mode."""
    transformers.logging.set_verbosity_error()  # small vocabularies lack the special tokens that configurations name
    kind = KINDS[name]
    torch.manual_seed(seed)
    return getattr(transformers, kind.model)(getattr(transformers, kind.config)(**kind.options)).double().train()


def batches(name, number, rows, seed=1):
    """Padded texts, in as many lengths as rows, and labels in which what does not count is -100; or images."""
    drawn, task = torch.Generator().manual_seed(seed), KINDS[name].task
    return [batch(task, rows, drawn) for _ in range(number)]


def batch(task, rows, drawn):
    """One minibatch: named inputs, and the target."""
    if task == "images":
        x = torch.randn(rows, 3, 8, 8, generator=drawn, dtype=torch.float64)
        return {"pixel_values": x}, torch.randint(CLASSES, (rows,), generator=drawn)
    ids = torch.randint(3, WORDS, (rows, LENGTH), generator=drawn)
    lengths = torch.randint(3, LENGTH + 1, (rows, 1), generator=drawn)
    mask = (torch.arange(LENGTH) < lengths).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if task == "classes":
        return inputs, torch.randint(CLASSES, (rows,), generator=drawn)
    if task == "causal":
        return inputs, ids.masked_fill(mask == 0, -100)
    if task == "masked":
        hidden = (torch.rand(ids.shape, generator=drawn) < 0.4) & (mask > 0)
        hidden[:, 0] = True
        return {**inputs, "input_ids": (ids * mask).masked_fill(hidden, 3)}, ids.masked_fill(~hidden, -100)
    labels = torch.randint(3, WORDS, (rows, SHORT), generator=drawn)
    labels = labels.masked_fill(torch.arange(SHORT) >= torch.randint(2, SHORT + 1, (rows, 1), generator=drawn), -100)
    start = torch.zeros(rows, 1, dtype=torch.long)
    shifted = torch.cat([start, labels[:, :-1].clamp(min=0)], 1)
    return {**inputs, "decoder_input_ids": shifted}, labels
