"""plain.py with three changed lines: its model in a pipeline.

torchrun --nproc-per-node 2 own.py --text FOLDER --output_dir run --max_steps 60 ...any of TrainingArguments
FOLDER has train.txt and validation.txt; a tokenizer is trained on the first one.
"""

import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from stretto.transformers import StrettoTrainer


@dataclass
class ScriptArguments:
    """The data and the model."""

    text: str
    block_size: int = 64
    width: int = 64
    layers: int = 4
    vocabulary: int = 1000
    characters: int = 1_000_000


def tokenizer_of(train: Path, size: int) -> PreTrainedTokenizerFast:
    """Byte pairs learned from the text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train([str(train)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=special[0], eos_token=special[0], pad_token=special[0]
    )


def main() -> None:
    """Train, evaluate and save."""
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    files = {name: str(Path(script.text) / f"{name}.txt") for name in ("train", "validation")}
    tokenizer = tokenizer_of(Path(files["train"]), script.vocabulary)
    raw = load_dataset("text", data_files=files, sample_by="document")
    raw = raw.map(lambda texts: {"text": [text[: script.characters] for text in texts["text"]]}, batched=True)

    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=script.width, intermediate_size=4 * script.width,
        num_hidden_layers=script.layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    def group_texts(examples):
        joined = {name: list(chain(*texts)) for name, texts in examples.items()}
        end = len(joined["input_ids"]) // script.block_size * script.block_size
        blocks = {
            name: [values[i : i + script.block_size] for i in range(0, end, script.block_size)]
            for name, values in joined.items()
        }
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    with args.main_process_first(desc="tokenize and group texts"):
        tokenized = raw.map(lambda texts: tokenizer(texts["text"]), batched=True, remove_columns=["text"])
        blocks = tokenized.map(group_texts, batched=True)

    def compute_metrics(predicted):
        hits = predicted.predictions[:, :-1] == predicted.label_ids[:, 1:]
        return {"accuracy": float(hits.mean())}

    trainer = StrettoTrainer(
        model=model,
        args=args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        stages=2,
    )

    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    result = trainer.train(resume_from_checkpoint=last is not None)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
