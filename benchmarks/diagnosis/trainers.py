"""Trainers in one process, as their users have them. Each takes a Setup and gives what `stretto.diagnose` is told.

A hook on the optimizer copies the gradients of its last step, and the weights before it; nothing else is changed.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from networks import Setup
from right_networks import count, sum_of_losses
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset

from stretto.analysis.diagnosis.passes import dense

RATE = 0.05
Dumped = dict[str, Any]
Make = Callable[[Any], Optimizer]
SGD_OF_ALL: Make = partial(SGD, lr=RATE)


def copied(value: Tensor | None) -> Tensor | None:
    return None if value is None else dense(value.detach()).clone()


def hooked(optimizer: Optimizer, model: nn.Module, *, after: bool = False) -> Dumped:
    """What the optimizer's last step saw, once it has been made. `after`: its gradients come to be within the step."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: Dumped = {"gradients": {}, "weights": {}}

    def copy(kind: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                found[kind][names[id(p)]] = copied(p if kind == "weights" else p.grad)

    optimizer.register_step_pre_hook(partial(copy, "weights"))
    (optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook)(partial(copy, "gradients"))
    return found


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def clipped_by_hand(parameters: Sequence[nn.Parameter], bound: float) -> None:
    """As papers have it: nothing is added to the length."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    length = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    if length > bound:
        for gradient in gradients:
            gradient.mul_(bound / length)


CLIPS: dict[str, Callable[..., Any]] = {"torch": nn.utils.clip_grad_norm_, "hand": clipped_by_hand}


def plain(
    s: Setup,
    *,
    parts: int = 1,
    clip: tuple[str, float] | None = None,
    amp: torch.dtype | None = None,
    steps: int = 1,
    optimizer: Make = SGD_OF_ALL,
    scaler: float | None = None,
) -> Dumped:
    """A loop of one's own: each part's loss counts by what it is a mean over; a sum is a sum."""
    made = optimizer(s.model.parameters())
    found = hooked(made, s.model)
    is_sum = s.loss is sum_of_losses
    total = count(s.target, s.loss)
    scaling = torch.amp.GradScaler("cpu", init_scale=scaler or 1.0, enabled=scaler is not None)
    for _ in range(steps):
        made.zero_grad()
        for x, y in zip(s.inputs.chunk(parts), s.target.chunk(parts), strict=True):
            own = count(y, s.loss)
            if own:
                with autocast(amp):
                    loss = s.loss(s.model(x), y) * (1.0 if is_sum else own / total)
                scaling.scale(loss).backward()
        if scaler:
            scaling.unscale_(made)
        if clip:
            CLIPS[clip[0]](list(s.model.parameters()), clip[1])
        made.step()
    return found


def weights_after(s: Setup, *, parts: int, optimizer: Make, steps: int = 1) -> Dumped:
    """A trainer of which only the weights before and after its last step are known, and its optimizer's state."""
    states: list[Any] = []

    def watched(parameters: Any) -> Optimizer:
        made = optimizer(parameters)
        made.register_step_pre_hook(lambda made, args, kwargs: states.append(deepcopy(made.state_dict())))
        return made

    before = plain(s, parts=parts, optimizer=watched, steps=steps)["weights"]
    after = {name: p.detach().clone() for name, p in s.model.named_parameters()}
    told = {"weights": before, "after": after, "optimizer": optimizer}
    return told | ({"optimizer_state": states[-1]} if steps > 1 else {})


def both_names(s: Setup) -> Dumped:
    """As model.named_parameters(remove_duplicate=False) gives them: a tied weight under each of its names."""
    plain(s)
    return {"gradients": {name: copied(p.grad) for name, p in s.model.named_parameters(remove_duplicate=False)}}


class Rows(Dataset[Any]):
    """The batch's examples one by one; as a dict, if `keys` are given."""

    def __init__(self, s: Setup, keys: tuple[str, str] | None = None) -> None:
        self.s, self.keys = s, keys

    def __len__(self) -> int:
        return len(self.s.target)

    def __getitem__(self, index: int) -> Any:
        pair = (self.s.inputs[index], self.s.target[index])
        return dict(zip(self.keys, pair, strict=True)) if self.keys else pair


def loader(s: Setup, parts: int) -> DataLoader[Any]:
    return DataLoader(Rows(s), batch_size=len(s.target) // parts)


def lightning(s: Setup, *, parts: int, clip: float | None = None, precision: str = "32-true") -> Dumped:
    """Lightning's accumulate_grad_batches. Its closure runs within the optimizer's step."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = s.model
            self.found: Dumped = {}

        def training_step(self, batch: Any, index: int) -> Tensor:
            return s.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Optimizer:
            made = SGD(self.net.parameters(), lr=RATE)
            self.found = hooked(made, self.net, after=True)
            return made

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=parts,
            gradient_clip_val=clip,
            precision=precision,  # type: ignore[arg-type]
            enable_model_summary=False,
            default_root_dir=folder,
            **quiet,  # type: ignore[arg-type]
        )
        trainer.fit(module, loader(s, parts))
    return module.found


def transformers(s: Setup, *, parts: int, clip: float = 0.0, bf16: bool = False) -> Dumped:
    """transformers' Trainer with gradient_accumulation_steps, and its own loss."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=len(s.target) // parts,
            gradient_accumulation_steps=parts,
            max_grad_norm=clip,
            bf16=bf16,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        optimizer = SGD(s.model.parameters(), lr=RATE)
        found = hooked(optimizer, s.model)
        keys = ("input_ids", "labels")
        Trainer(s.model.inner, arguments, train_dataset=Rows(s, keys), optimizers=(optimizer, None)).train()
    return found


def accelerate(s: Setup, *, parts: int, clip: float | None = None, bf16: bool = False) -> Dumped:
    """accelerate's `accumulate`; the loss is a mean, and all parts have as many of it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts, mixed_precision="bf16" if bf16 else "no")
    optimizer = SGD(s.model.parameters(), lr=RATE)
    found = hooked(optimizer, s.model)
    model, made, batches = accelerator.prepare(s.model, optimizer, loader(s, parts))
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(s.loss(model(x), y))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            made.step()
            made.zero_grad()
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


def checkpointed(s: Setup, *, parts: int) -> Dumped:
    """Activations are computed again in the backward."""
    from torch.utils.checkpoint import checkpoint

    def again(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    for module in blocks(s.model):
        module.forward = partial(again, module, module.forward)  # type: ignore[method-assign]
    return plain(s, parts=parts)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    yield from (model.blocks if hasattr(model, "blocks") else model.children())
