"""Training scripts that know nothing of processes: what each process returns is compared in test_processes.py."""

import gc
import hashlib
import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

import torch
from tiny_models import Examples, arguments, build

from late_imports import Late, no_garbage
from runtime.worlds import part
from stretto.errors import UsageError

piped, transformers = Late("stretto.transformers"), Late("transformers")
CLOCKS = ("runtime", "per_second", "preparation_time")
RUNS = {  # name: kind of model, method, options of the model
    "1f1b": ("llama", "1f1b(microbatches=2)", {}),
    "pb": ("gpt2", "pb", {"dropout": 0.1}),
    "masked": ("bert", "1f1b(microbatches=2)", {}),
    "adapters": ("lora", "zb-h1(microbatches=2)", {}),
}


def after_steps(call):
    """A callback that calls a function with the arguments, the state and the control after each step."""

    class AfterSteps(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            call(args, state, control)

    return AfterSteps()


def kill(at_step, rank):
    """A callback that is the kill -9 of one process, after a step."""

    def end(args, state, control):
        if state.global_step == at_step and args.process_index == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return after_steps(end)


def stop_rank_one(args, state, control):
    """A decision that one process alone makes."""
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
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
        unk_token="[UNK]",
    )
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4)


def trainer_of(name, folder, callbacks=(), **options):
    kind, method, of_model = RUNS[name]
    usual = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    return piped.StrettoTrainer(
        build(kind, **of_model), arguments(folder, **{**usual, **options}), train_dataset=Examples(kind),
        eval_dataset=Examples(kind, 6, seed=7), compute_metrics=metrics, callbacks=list(callbacks),
        data_collator=masked_words() if name == "masked" else None, method=method,
    )  # fmt: skip


def logs_of(trainer):
    return [{k: v for k, v in entry.items() if not k.endswith(CLOCKS)} for entry in trainer.state.log_history]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(name, folder, resume=None, killed=None, callbacks=(), **options):
    """Logs, the digest of the saved weights and the metrics of a prediction."""
    torch.set_num_threads(1)
    callbacks = [*callbacks, *([kill(*killed)] if killed else [])]
    trainer = trainer_of(name, folder, callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "model"))
    (saved,) = (folder / "model").glob("*model.safetensors")
    predicted = trainer.predict(Examples(RUNS[name][0], 5, seed=8))
    shape = None if predicted.predictions is None else predicted.predictions.shape
    told = {k: v for k, v in predicted.metrics.items() if not k.endswith(CLOCKS)}
    return {"logs": logs_of(trainer), "weights": digest(saved), "metrics": told, "shape": shape,
            "batch": trainer.get_total_train_batch_size(trainer.args)}  # fmt: skip


def stopped(folder):
    """The step after which training ends that one process stops."""
    trainer = trainer_of("1f1b", folder, [after_steps(stop_rank_one)])
    trainer.train()
    return trainer.state.global_step


def refused(folder):
    """What a process is told that reads other data than the first one."""
    trainer = trainer_of("1f1b", folder)
    trainer.train_dataset = Examples("llama", seed=trainer.args.process_index)
    try:
        trainer.train()
    except UsageError as error:
        return str(error)


def do_all(names, folder):
    """What comes of runs and of the two functions above, by their names, each in a folder of its own."""
    others = {"stopped": stopped, "refused": refused}
    return {name: others[name](folder / name) if name in others else train(name, folder / name) for name in names}


def do_all_on(number, names, folder):
    """What `do_all` gives in each of so many processes: forks of this one, which alone imports what takes seconds."""
    with no_garbage():
        import stretto.transformers  # noqa: F401
    gc.freeze()  # after each training a Trainer looks for garbage in all that is not frozen
    with ProcessPoolExecutor(number, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(do_all_as, range(number), *map(repeat, (number, names, folder))))


def do_all_as(rank, number, names, folder):
    """`do_all` with the variables that a launcher sets."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", number)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    told = do_all(names, folder)
    part()
    return told
