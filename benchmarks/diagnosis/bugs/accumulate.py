"""A step of transformers' Trainer with four accumulated batches; writes weights.pt and gradients.pt (README.md)."""

import torch
import transformers
from network import batch, build
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer, TrainingArguments

model = build()
torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, "weights.pt")
inputs, labels = batch()
rows = [{"input_ids": x, "labels": y} for x, y in zip(inputs["input_ids"], labels, strict=True)]


class InOrder(Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(rows)


def dump(*_: object) -> None:
    """Save the gradients of the step."""
    torch.save({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, "gradients.pt")


register_optimizer_step_pre_hook(dump)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_steps=1,
    max_grad_norm=0,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
)
InOrder(model, arguments, train_dataset=rows).train()
print(transformers.__version__)
