"""Arguments of transformers.Trainer and of stretto.Trainer: parted, refused by name where they cannot work, and what
transformers sees of the processes.

transformers and accelerate see one process. Both ask accelerate's PartialState how many there are: with two they would
wrap the model for data parallelism, deal batches out and add up their counts. Here all processes train one model on the
same batches, so each of them sees one; only its index stays the true rank, by which rank 0 alone writes.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import Trainer, TrainingArguments

from stretto.errors import UsageError, nearest
from stretto.options.checks import refuse_float16
from stretto.trainer.trainer import Trainer as PipelineTrainer

SET_BY_ARGUMENTS = {
    "loss": "compute_loss_func=",
    "optimizer": "TrainingArguments(optim=...), or optimizer_cls_and_kwargs=",
    "scheduler": "TrainingArguments(lr_scheduler_type=...)",
    "clip": "TrainingArguments(max_grad_norm=...)",
    "example": "nothing: it is the first batch",
}
DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")
HOOKED = ("layerwise", "lomo", "galore", "apollo", "schedule_free", "stable_adamw")  # parts of optimizers' names

Row = tuple[str, Callable[[Any], Any], str]
ROWS: tuple[Row, ...] = (
    ("deepspeed", bool, "DeepSpeed has a pipeline and optimizers of its own: leave it out"),
    ("fsdp", bool, 'it wraps the whole model: use sync="fully-shard" with mesh=Mesh(data=...)'),
    ("parallelism_config", bool, "it wraps the whole model: use mesh=Mesh(...)"),
    ("torch_compile", bool, "it compiles the whole model: compile the stages, stages=[torch.compile(...), ...]"),
    ("fp16_full_eval", bool, "evaluation computes as training does: leave it out"),
    ("bf16_full_eval", bool, "evaluation computes as training does: leave it out"),
    ("activation_checkpointing", bool, 'a method recomputes by itself: method="1f1b(recompute=True)"'),
    (
        "gradient_checkpointing",
        bool,
        'a method recomputes by itself: method="1f1b(recompute=True)"',
    ),  # the same, formerly
    ("use_liger_kernel", bool, "its loss is computed inside the model, where the last stage has no labels"),
    ("neftune_noise_alpha", lambda value: value is not None, "its noise would differ from process to process"),
    ("auto_find_batch_size", bool, "processes would find different sizes: set per_device_train_batch_size"),
    ("enable_jit_checkpoint", bool, "each process would save when its own signal comes: use save_strategy"),
    ("save_on_each_node", bool, "the folder is written once, by rank 0 and for checkpoints by all processes"),
    ("predict_with_generate", bool, "a pipeline does not generate: generate with the model that save_model wrote"),
    ("debug", bool, "it watches the whole model's forward: debug on one process with transformers' own Trainer"),
    *((name, lambda value: value is not None, "there is no DistributedDataParallel: leave it out") for name in DDP),
)


def refuse_arguments(args: TrainingArguments) -> None:
    """Raise UsageError for the first of TrainingArguments that cannot work, with the remedy."""
    if args.fp16:
        refuse_float16("fp16")
    for name, is_set, why in ROWS:
        value = getattr(args, name, None)
        if is_set(value):
            raise UsageError(f"TrainingArguments({name}={value!r}) does not work with StrettoTrainer: {why}")
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if scheduler in ("reduce_lr_on_plateau", "greedy"):
        raise UsageError(
            f"TrainingArguments(lr_scheduler_type={scheduler!r}) needs a metric, which a stage's update does not have: "
            "choose a schedule that depends on the number of updates alone"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(part in optimizer for part in HOOKED):
        raise UsageError(
            f"TrainingArguments(optim={optimizer!r}) changes the weights in hooks, or more than once a step, which "
            "stages cannot follow: choose another, such as adamw_torch"
        )
    config: Any = args.accelerator_config
    if config.dispatch_batches:
        raise UsageError(
            "accelerator_config: dispatch_batches=True reads batches on rank 0 alone, but each process "
            "reads all of them: leave it out"
        )


def refuse_overridden(trainer: Any, base: type, names: dict[str, str]) -> None:
    """Raise UsageError for a subclass that overrides what is never called; `names` says what to do instead."""
    for name, remedy in names.items():
        if getattr(type(trainer), name, None) is not getattr(base, name, None):
            raise UsageError(f"{type(trainer).__name__}.{name} is overridden, but never called: {remedy}")


def refuse_adapters(model: Any) -> None:
    """Raise UsageError for PEFT models whose adapters are not inside the layers."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise UsageError(
                f"adapter {name!r} is {config.peft_type}, which changes the model's inputs before its first stage: "
                "use LoRA, or another adapter inside the layers"
            )


def show_one_process(args: TrainingArguments, rank: int, local_rank: int) -> None:
    """Make this process look like a single one of index `rank`; TrainingArguments made later undo it."""
    _ = args.device  # sets up the state, the first time
    states = [PartialState()]
    if AcceleratorState._shared_state:
        states.append(AcceleratorState())
    for state in states:
        state.distributed_type, state.num_processes = DistributedType.NO, 1
        state.process_index, state.local_process_index = rank, local_rank
    args._n_gpu = min(args.n_gpu, 1)  # several would be trained by nn.DataParallel


@contextmanager
def as_first(args: TrainingArguments) -> Iterator[None]:
    """In this block the process has index 0: workers of its DataLoaders get the seeds that those of rank 0 get."""
    state = PartialState()
    index = state.process_index
    state.process_index = 0
    try:
        yield
    finally:
        state.process_index = index


def parted_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of transformers.Trainer, and those of stretto.Trainer. Raises UsageError for any other."""
    of_transformers = inspect.signature(Trainer.__init__).parameters
    of_stretto = [
        name
        for name, parameter in inspect.signature(PipelineTrainer.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in SET_BY_ARGUMENTS
    ]
    for name in options:
        if name in SET_BY_ARGUMENTS:
            raise UsageError(f"StrettoTrainer({name}=...) is set by {SET_BY_ARGUMENTS[name]}")
        if name not in of_transformers and name not in of_stretto:
            known = [*of_transformers, *of_stretto, "method", "stages"]
            raise UsageError(f"StrettoTrainer has no argument {name!r}: {nearest(name, known)}")
    given = {name: value for name, value in options.items() if name in of_transformers}
    return given, {name: value for name, value in options.items() if name not in of_transformers}


def defaults(args: TrainingArguments) -> dict[str, Any]:
    """What TrainingArguments say of a stretto.Trainer's further arguments."""
    options: dict[str, Any] = {"device": args.device.type, "seed": args.seed}  # each process a device of its own
    if args.bf16:
        options["precision"] = "bf16-autocast"  # as accelerate's: weights stay in float32
    return options
