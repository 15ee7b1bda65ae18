"""A model's own loss as a function of its outputs and the labels, with sum and count, as stages need it.

transformers computes the loss inside a model's forward. Here the labels are where the last stage is, and a minibatch is
cut into micro-batches, so the loss has to be a sum and a count. Which loss a model has is not asked of its class: the
known losses are tried on one batch, and the one that equals the model's own is taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from stretto.errors import UsageError
from stretto.losses import CrossEntropy, Loss, Sum, call, next_token_cross_entropy, token_cross_entropy
from stretto.nn.batch import IGNORED
from stretto.nn.preserve import device_of, undisturbed
from stretto.transformers.minibatch import Inputs

SumAndCount = tuple[Tensor, Tensor]
LARGEST_DIFFERENCE = 1e-4  # between the model's loss and a known one, relative: float32 and other orders of sums


def squared_error(output: Tensor, target: Tensor) -> SumAndCount:
    """Regression: the mean over all entries."""
    error = (output.squeeze() - target.squeeze().to(output.dtype)) ** 2
    return error.sum(), torch.tensor(error.numel())


def binary_cross_entropy(output: Tensor, target: Tensor) -> SumAndCount:
    """Classes that do not exclude each other: the mean over all entries."""
    loss = functional.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="sum")
    return loss, torch.tensor(output.numel())


KNOWN: Mapping[str, Loss] = {
    "of the next token": next_token_cross_entropy,
    "of each token": token_cross_entropy,
    "of classes": CrossEntropy(),
    "of regression": squared_error,
    "of several classes at once": binary_cross_entropy,
}


@dataclass(frozen=True)
class Outputs:
    """The names of a model's outputs, in order, as the last stage returns them: a tensor if there is one."""

    names: tuple[str, ...]
    kind: type = ModelOutput

    def named(self, output: Any) -> dict[str, Tensor]:
        """The output by name. That of an auxiliary head, one tensor, is the logits."""
        if isinstance(output, tuple):
            return dict(zip(self.names, output, strict=True))
        return {self.names[0] if len(self.names) == 1 else "logits": output}

    def logits(self, output: Any) -> Tensor:
        named = self.named(output)
        return named["logits"] if "logits" in named else next(iter(named.values()))


@dataclass(frozen=True, eq=False)
class OfLogits:
    """A known loss of a model with further outputs."""

    outputs: Outputs
    loss: Loss

    def __call__(self, output: Any, target: Any) -> Any:
        logits = self.outputs.logits(output)
        return (
            self.loss.sum_and_count(logits, target)
            if isinstance(self.loss, CrossEntropy)
            else self.loss(logits, target)
        )


@dataclass(frozen=True, eq=False)
class OverAllLabels:
    """The loss of the next token, divided by the number of all labels, the first of each text included.

    transformers counts so where a model's class does not say that its loss shifts labels (GPT2LMHeadModel in 5.23).
    """

    outputs: Outputs

    def __call__(self, output: Any, target: Tensor) -> SumAndCount:
        total, _ = next_token_cross_entropy.sum_and_count(self.outputs.logits(output), target)
        return total, target.ne(IGNORED).sum()


@dataclass(frozen=True, eq=False)
class OfTrainer:
    """A loss that divides by num_items_in_batch: the user's compute_loss_func, or transformers' label smoother."""

    outputs: Outputs
    function: Callable[..., Tensor]
    shifts: bool = False  # whether the label at 0 is no target
    options: Mapping[str, Any] = field(default_factory=dict)
    divides: bool = True  # False: it takes no num_items_in_batch, and is the mean over what counts

    def __call__(self, output: Any, target: Any) -> SumAndCount:
        """Its value for a count of 1, which is the sum, and the count."""
        named, count = self.outputs.kind(**self.outputs.named(output)), self.count(target)
        if not self.divides:
            return self.function(named, target, **self.options) * count, count
        one = torch.ones((), device=count.device)
        return self.function(named, target, num_items_in_batch=one, **self.options), count

    def count(self, target: Any) -> Tensor:
        labels = next(iter(target.values())) if isinstance(target, Mapping) else target
        counted: Tensor = (labels[..., 1:] if self.shifts else labels).ne(IGNORED)
        return counted.sum()


def outputs_of(model: nn.Module, inputs: Inputs) -> tuple[Outputs, Mapping[str, Any]]:
    """The names of the model's outputs, and the outputs themselves, in evaluation mode."""
    with trial(model):
        given = model(**inputs)
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{type(model).__name__} returns a {type(given).__name__}: StrettoTrainer needs its outputs by name, "
            "a ModelOutput or a dict (return_dict=True)"
        )
    names = tuple(name for name, value in given.items() if name != "loss" and isinstance(value, Tensor))
    return Outputs(names, type(given)), given


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with undisturbed([model], device), torch.no_grad():
        yield


def divides(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model's loss is a sum divided by num_items_in_batch, which its forward takes."""
    with trial(model):
        losses = [float(model(**inputs, num_items_in_batch=torch.tensor(count))["loss"]) for count in (1.0, 2.0)]
    return losses[0] != losses[1]


def own_loss(model: nn.Module, inputs: Inputs, labels: Inputs, *, shifts: bool, takes_count: bool) -> Loss:
    """The known loss that equals the model's own on this batch. Raises UsageError if none does.

    `shifts` says whether transformers leaves the first label of each text out of its count, `takes_count` whether the
    model's forward takes num_items_in_batch.
    """
    clamped = {name: value if value.is_floating_point() else value.clamp(min=0) for name, value in labels.items()}
    outputs, given = outputs_of(model, {**inputs, **clamped})
    marked = {name: drawn_labels(value, given) for name, value in clamped.items()}
    with told_apart(model, outputs.logits(tuple(given[name] for name in outputs.names))):
        return matching_loss(model, inputs, labels, marked, shifts=shifts, takes_count=takes_count)


def matching_loss(
    model: nn.Module, inputs: Inputs, labels: Inputs, marked: Inputs, *, shifts: bool, takes_count: bool
) -> Loss:
    """The known loss that equals the model's own for the labels `marked`, as `own_loss` says."""
    outputs, given = outputs_of(model, {**inputs, **marked})
    loss = given.get("loss")
    if loss is None:
        raise UsageError(
            f"{type(model).__name__} returned no loss for the labels {', '.join(labels)}: give compute_loss_func="
        )
    output = tuple(given[name] for name in outputs.names)
    expected, nearest = float(loss), []
    for name, known in KNOWN.items() if len(labels) == 1 else ():
        value = tried(OfLogits(outputs, known), output if len(output) > 1 else output[0], next(iter(marked.values())))
        if value is not None and abs(value - expected) <= LARGEST_DIFFERENCE * max(1.0, abs(expected)):
            counts_all = known is next_token_cross_entropy and takes_count and not shifts
            if counts_all and divides(model, {**inputs, **marked}):
                return OverAllLabels(outputs)
            return known if len(outputs.names) == 1 else OfLogits(outputs, known)
        nearest.append(f"{name} {'does not fit' if value is None else f'{value:.6g}'}")
    raise UsageError(
        f"{type(model).__name__} computes a loss inside its forward, {expected:.6g} on the first batch, that is none "
        f"that stages know ({'; '.join(nearest) or 'of one kind of labels'}): give it as compute_loss_func(outputs, "
        "labels, num_items_in_batch), a sum divided by num_items_in_batch"
    )


def refuse_another(model: nn.Module, loss: Loss, inputs: Inputs, labels: Inputs, *, takes_count: bool) -> None:
    """Raise UsageError unless `loss` is the model's own on this batch, both of one forward in training mode.

    `takes_count`: as for `own_loss`.
    """
    outputs, _ = outputs_of(model, inputs)
    target = one_of(labels)
    with trial(model):
        model.train()
        options = {"num_items_in_batch": torch.ones((), device=device_of([model]))} if takes_count else {}
        given = model(**inputs, **labels, **options)
        output = tuple(given[name] for name in outputs.names)
        found = call(loss, output if len(output) > 1 else output[0], target)
    if isinstance(found, Sum) and not float(found.count):
        return
    value = found.mean if isinstance(found, Sum) else found
    if isinstance(found, Sum) and takes_count and divides(model, {**inputs, **labels}):
        value = found.total
    ours, theirs = float(value), float(given["loss"])
    if abs(ours - theirs) > LARGEST_DIFFERENCE * max(1.0, abs(ours)):
        raise UsageError(
            f"{type(model).__name__} computes a loss inside its forward that was one of its outputs and the labels on "
            f"the first batch, and is not on another one ({', '.join(inputs)}): {theirs:.6g} in training mode, where "
            f"stages would train on {ours:.6g}. Give it as compute_loss_func(outputs, labels, num_items_in_batch), a "
            "sum divided by num_items_in_batch"
        )


def kind_of(batch: Inputs) -> tuple[Any, ...]:
    """The kind of a batch: the names, dtypes and numbers of dims of its tensors, and which of them are padded."""
    return tuple(
        (name, value.dtype, value.dim(), not value.is_floating_point() and has_padding(name, value))
        for name, value in sorted(batch.items())
    )


def has_padding(name: str, value: Tensor) -> bool:
    """Whether labels have entries to ignore, or a mask has zeros."""
    return bool((value == (0 if "mask" in name else IGNORED)).any())


def telling_rows(labels: Inputs, most: int) -> Tensor:
    """The numbers of at most so many examples: half of them those with the most labels to ignore, half the least."""
    target = next(iter(labels.values()))
    ignored = (target == IGNORED).reshape(len(target), -1).sum(1)
    order = ignored.argsort(descending=True, stable=True)
    return order if len(order) <= most else torch.cat([order[: most // 2], order[-(most - most // 2) :]])


@contextmanager
def told_apart(model: nn.Module, logits: Tensor) -> Iterator[None]:
    """In this block logits differ between classes, without which losses of tokens are equal.

    The weights of an output layer that begins with zeros are drawn, and zeros again behind the block. Raises UsageError
    where it is not known which layer that is.
    """
    if logits.dim() < 3 or not torch.equal(logits, logits[..., :1].expand_as(logits)):
        yield
        return
    find_layer: Any = getattr(model, "get_output_embeddings", lambda: None)
    layer = find_layer()
    if not isinstance(getattr(layer, "weight", None), Tensor):
        raise UsageError(
            f"{type(model).__name__} gives every class the same logit on the first batch (an output layer of zeros?), "
            "so its loss cannot be told from others: give it as compute_loss_func(outputs, labels, "
            "num_items_in_batch), a sum divided by num_items_in_batch"
        )
    weight, draws = layer.weight, torch.Generator().manual_seed(0)
    before = weight.data
    weight.data = torch.randn(weight.shape, generator=draws).to(weight.data)
    try:
        yield
    finally:
        weight.data = before


def drawn_labels(labels: Tensor, given: Mapping[str, Any]) -> Tensor:
    """Random classes in place of whole-numbered labels: of labels that are nearly all alike, losses hardly differ."""
    rows = [value for value in given.values() if isinstance(value, Tensor) and value.shape[:-1] == labels.shape]
    if labels.is_floating_point() or not rows:
        return labels
    draws = torch.Generator().manual_seed(0)
    return torch.randint(rows[0].shape[-1], labels.shape, generator=draws).to(labels)


def tried(loss: OfLogits, output: Any, target: Tensor) -> float | None:
    """The mean that a known loss gives; None where shapes do not fit."""
    try:
        total, count = loss(output, target)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return float(total) / float(count)


def divided_loss(
    outputs: Outputs, function: Callable[..., Tensor], labels: Inputs, given: Any, *, shifts: bool
) -> Loss:
    target = one_of(labels)
    named = outputs.kind(**{name: given[name] for name in outputs.names})
    values = [float(function(named, target, num_items_in_batch=torch.tensor(count))) for count in (1.0, 2.0)]
    if abs(values[0] - 2 * values[1]) > LARGEST_DIFFERENCE * abs(values[0]):
        raise UsageError(
            f"compute_loss_func does not divide by num_items_in_batch: it returned {values[0]:.6g} for 1 and "
            f"{values[1]:.6g} for 2. Micro-batches and replicas need a sum divided by that number: "
            'cross_entropy(..., reduction="sum") / num_items_in_batch'
        )
    return OfTrainer(outputs, function, shifts)


def one_of(labels: Mapping[str, Any] | Sequence[Any]) -> Any:
    """The labels as a loss gets them: a tensor if there is one, else all of them by name."""
    if isinstance(labels, Mapping):
        return next(iter(labels.values())) if len(labels) == 1 else dict(labels)
    return labels
