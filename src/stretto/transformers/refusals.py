"""What cannot work, refused by name before anything is trained."""

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from stretto.errors import UsageError
from stretto.options.float16 import refuse_float16

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
        raise UsageError("accelerator_config: dispatch_batches=True reads batches on rank 0 alone, but each process "
                         "reads all of them: leave it out")  # fmt: skip


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
