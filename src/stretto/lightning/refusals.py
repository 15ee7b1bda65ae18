"""What cannot work in a pipeline, refused by name before anything is trained."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from stretto.errors import UsageError
from stretto.mesh import Mesh
from stretto.options.checks import of_kind, positive, whole
from stretto.replicas import find as find_sync

MODULE_HOOKS = {
    "on_after_backward": "looks at gradients",
    "on_before_optimizer_step": "looks at gradients",
    "configure_gradient_clipping": "changes gradients",
    "backward": "runs the backward itself",
    "optimizer_step": "steps the optimizer itself",
    "optimizer_zero_grad": "drops gradients itself",
}
CALLBACK_HOOKS = ("on_after_backward", "on_before_optimizer_step")
CALLBACKS = {  # by name: Lightning 2.5 does not have all of them
    "StochasticWeightAveraging": "averages all weights in each process",
    "WeightAveraging": "averages all weights in each process",
    "ModelPruning": "cuts all weights in each process",
    "BaseFinetuning": "adds groups to the optimizer while it trains",
    "LearningRateFinder": "trains the whole module for a trial",
    "BatchSizeFinder": "trains the whole module for a trial",
}
PRECISIONS = {"32-true": None, "64-true": None, "bf16-true": "bf16", "bf16-mixed": "bf16-autocast"}


def refuse_arguments(options: dict[str, Any]) -> None:
    """Raise UsageError for arguments of the strategy that a module of Lightning cannot be trained with."""
    taken = {
        "precision": "precision= of Lightning's Trainer, 'bf16-mixed'",
        "clip": "gradient_clip_val= of Lightning's Trainer",
        "scheduler": "configure_optimizers",
        "optimizer": "configure_optimizers",
        "loss": "training_step",
        "example": "the first batch",
        "device": "accelerator= and devices= of Lightning's Trainer",
        "workers": "devices= of Lightning's Trainer",
    }
    for name in taken.keys() & options.keys():
        raise UsageError(f"StrettoStrategy({name}=...): it comes from {taken[name]}")
    mesh = Mesh() if options.get("mesh") is None else options["mesh"]
    of_kind("StrettoStrategy: mesh", mesh, Mesh, "stretto.Mesh(data=2)")
    if mesh.inside > 1:
        raise UsageError(f"StrettoStrategy({mesh}): processes share no stage here; use mesh=Mesh(data=N) alone")
    whole("StrettoStrategy: seed", options.get("seed", 0))
    positive("StrettoStrategy: timeout", options.get("timeout", 600))
    sync = find_sync(options.get("sync", "all-reduce"))
    if sync.serving is not None or sync.sharding is not None or sync.shares_optimizer:
        raise UsageError(
            f"StrettoStrategy(sync={sync.name!r}): optimizers of configure_optimizers step whole stages; use "
            "'all-reduce', 'local-sgd(every=8)' or 'diloco(every=8)'"
        )


def precision_of(name: str) -> str | None:
    if name not in PRECISIONS:
        float16 = name.startswith("16")
        why = ": a scale of the loss belongs to the whole model, and stages update at different times" * float16
        raise UsageError(f"precision={name!r} cannot be trained in stages{why}. Choose from {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def refuse_training(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise UsageError for what the module, or a callback, does that training in stages cannot do."""
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise UsageError(
            f"{kind} sets automatic_optimization = False: a pipeline runs forwards, backwards and updates of many "
            "micro-batches by its schedule, so leave optimization to it"
        )
    for hook, what in MODULE_HOOKS.items():
        if is_overridden(hook, module):
            raise UsageError(
                f"{kind}.{hook} {what}, but stages update at different times, each in its own process: leave it out"
                + ", and use Trainer(gradient_clip_val=...)" * (hook == "configure_gradient_clipping")
            )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UsageError(f"{kind}.training_step takes dataloader_iter: take a batch, training_step(self, batch)")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        refuse_callback(callback)
    algorithm = trainer.gradient_clip_algorithm
    if trainer.gradient_clip_val and getattr(algorithm, "value", algorithm) == "value":
        raise UsageError(
            "gradient_clip_algorithm='value' is not there in stages: use 'norm', which holds for all stages together"
        )


def refuse_callback(callback: pl.Callback) -> None:
    """Raise UsageError for a callback that needs all weights or gradients in each process."""
    name = type(callback).__name__
    for kind in type(callback).__mro__:
        if kind.__name__ in CALLBACKS:
            what = CALLBACKS[kind.__name__]
            raise UsageError(
                f"the callback {name} {what}, but each process has the weights of its stages: leave it out"
            )
    for hook in CALLBACK_HOOKS:
        if is_overridden(hook, callback, parent=pl.Callback):
            raise UsageError(
                f"the callback {name} has {hook}, which looks at gradients: stages update at different times, each in "
                "its own process, and their gradients are gone then. Leave it out"
            )


def refuse_optimizers(optimizers: list[Any]) -> None:
    if len(optimizers) != 1 or isinstance(optimizers[0], _MockOptimizer):
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers: give one; groups may differ in their rates"
            if len(optimizers) != 1
            else "configure_optimizers returned None: give an optimizer"
        )


class StagePrecision(Precision):
    """Names a precision of Lightning, which the stages compute in."""

    def __init__(self, name: Any) -> None:
        self.precision = name

    def clip_gradients(self, *_: Any, **__: Any) -> None:
        """Do nothing: stages limit the norm of their gradients together."""


class StageDoublePrecision(DoublePrecision):
    """float64: the module and its batches are converted, as Lightning does it; the stages compute as they are."""

    def clip_gradients(self, *_: Any, **__: Any) -> None:
        """Do nothing: stages limit the norm of their gradients together."""


def plugin_for(given: Precision) -> Precision:
    """The plugin to use instead of the one that Lightning has chosen. Raises UsageError for others of the user's."""
    if isinstance(given, StagePrecision | StageDoublePrecision):
        return given
    if type(given) not in (Precision, HalfPrecision, MixedPrecision, DoublePrecision):
        raise UsageError(
            f"plugins={type(given).__name__}: its precision is not there in stages; leave it out, and choose "
            "precision='32-true', '64-true', 'bf16-true' or 'bf16-mixed'"
        )
    precision_of(str(given.precision))
    return StageDoublePrecision() if isinstance(given, DoublePrecision) else StagePrecision(given.precision)
