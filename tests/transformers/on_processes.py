"""Training scripts that know nothing of processes: what each process returns is compared in test_processes.py."""

import hashlib
import os
import signal

import torch
from tiny_models import Examples, arguments, build
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast, TrainerCallback

from stretto.errors import UsageError
from stretto.transformers import StrettoTrainer

CLOCKS = ("runtime", "per_second", "preparation_time")
RUNS = {  # name: kind of model, method, options of the model
    "1f1b": ("llama", "1f1b(microbatches=2)", {}),
    "pb": ("gpt2", "pb", {"dropout": 0.1}),
    "masked": ("bert", "1f1b(microbatches=2)", {}),
    "adapters": ("lora", "zb-h1(microbatches=2)", {}),
}


class Killed(TrainerCallback):
    """kill -9 of one process, after a step."""

    def __init__(self, step, rank):
        self.step, self.rank = step, rank

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step and args.process_index == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


class StopsRankOne(TrainerCallback):
    """A decision that one process alone makes."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3 and args.process_index == 1:
            control.should_training_stop = True


def metrics(of):
    return {"hits": float((of.predictions.argmax(-1) == of.label_ids).mean())}


def masked_words():
    """A collator that draws from torch's generator, as for masked language models."""
    from tokenizers import Tokenizer, models

    words = {name: number for number, name in enumerate(("[PAD]", "[MASK]", "[UNK]"))} | {
        str(n): n for n in range(3, 61)
    }
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[UNK]",
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)


def trainer_of(name, folder, callbacks=(), **options):
    kind, method, of_model = RUNS[name]
    usual = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    return StrettoTrainer(
        build(kind, **of_model), arguments(folder, **{**usual, **options}), train_dataset=Examples(kind),
        eval_dataset=Examples(kind, 6, seed=7), compute_metrics=metrics, callbacks=list(callbacks),
        data_collator=masked_words() if name == "masked" else None, method=method, stages=2,
    )  # fmt: skip


def logs_of(trainer):
    return [{k: v for k, v in entry.items() if not k.endswith(CLOCKS)} for entry in trainer.state.log_history]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(name, folder, resume=None, kill=None, callbacks=(), **options):
    """Logs, the digest of the saved weights and the metrics of a prediction."""
    torch.set_num_threads(1)
    callbacks = [*callbacks, *([Killed(*kill)] if kill else [])]
    trainer = trainer_of(name, folder, callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "model"))
    (saved,) = (folder / "model").glob("*model.safetensors")
    predicted = trainer.predict(Examples(RUNS[name][0], 5, seed=8))
    shape = None if predicted.predictions is None else predicted.predictions.shape
    told = {k: v for k, v in predicted.metrics.items() if not k.endswith(CLOCKS)}
    return {"logs": logs_of(trainer), "weights": digest(saved), "metrics": told, "shape": shape,
            "batch": trainer.get_total_train_batch_size(trainer.args)}  # fmt: skip


def train_all(folder):
    """Every run, one that one process stops, and files that processes other than rank 0 have written."""
    told = {name: train(name, folder / name) for name in RUNS}
    stopped = trainer_of("1f1b", folder / "stopped", [StopsRankOne()])
    stopped.train()
    return told, stopped.state.global_step, refused(folder)


def refused(folder):
    """What a process is told that reads other data than the first one."""
    trainer = trainer_of("1f1b", folder / "other")
    trainer.train_dataset = Examples("llama", seed=trainer.args.process_index)
    try:
        trainer.train()
    except UsageError as error:
        return str(error)
