"""Loss and accuracy of a model over batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.batch import inputs_on, target_on
from stretto.errors import UsageError
from stretto.precision import Precision


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Iterable[tuple[Any, Any]],
    device: torch.device,
    precision: Precision,
) -> dict[str, float]:
    """Mean loss over examples; accuracy over targets where targets are whole numbers one dimension short of outputs.

    Batches are weighted by their number of examples. Raises UsageError when there are none.
    """
    examples = targets = hits = 0
    total = 0.0
    with evaluating([model]):
        for x, y in batches:
            tensors, target = precision.inputs(inputs_on(x, device)), target_on(y, device)
            with precision.forward(device):
                output = model(*tensors)
                value = precision.loss(loss)(output, target)
            count = tensors[0].shape[0]
            examples += count
            total += float(value) * count
            if countable(output, target):
                hits += int((output.argmax(class_dim(output, target)) == target).sum())
                targets += target.numel()
    if not examples:
        raise UsageError("evaluate got no examples: the iterable of batches is empty (a used-up generator?)")
    result = {"loss": total / examples}
    if targets:
        result["accuracy"] = hits / targets
    return result


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Evaluation mode for a while; afterwards every submodule is in the mode it was in, frozen norms included."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    try:
        for root in modules:
            root.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def countable(output: Any, target: Any) -> bool:
    """Whether "the output's largest entry is the target" makes sense."""
    return (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and not target.is_floating_point()
        and output.dim() == target.dim() + 1
    )


def class_dim(output: Tensor, target: Tensor) -> int:
    """Classes stand last in [N, T, V] against [N, T], second in [N, K, H, W] against [N, H, W]."""
    return -1 if output.shape[:-1] == target.shape else 1
