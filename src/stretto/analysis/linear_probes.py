"""Linear probes: the accuracy of a linear classifier on the output of each stage.

Fitted on some examples and tested on others (Alain and Bengio 2016, arXiv 1610.01644).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.analysis.gradient_cosine import boundaries
from stretto.errors import UsageError
from stretto.nn.batch import check_examples, counted, with_numbers
from stretto.nn.input_errors import explaining_misfits
from stretto.nn.preserve import evaluating
from stretto.options.checks import of_kind, sequence, shown

Examples = tuple[Tensor, Tensor]

WIDEST = 512  # wider outputs of images are averaged over regions until they have no more features
DECAY = 1e-4
MOST_STEPS = 25  # of L-BFGS


def probes(stages: Sequence[nn.Module], train: Examples, test: Examples) -> tuple[float | None, ...]:
    """By stage: the accuracy on `test` of a probe fitted on `train`, both (x, y).

    y are classes, one for each example or one for each position; targets below 0 are ignored. None where a stage's
    first output has no floating-point numbers, or no position for each target.
    """
    check(stages, train, test)
    explained = explaining_misfits(
        lambda: "probes: the stages cannot take these examples", "Give train=(x, y) and test=(x, y) as in training"
    )
    with evaluating(stages), explained:
        fitted, tested = ([by_target(features, y) for features in outputs(stages, x)] for x, y in (train, test))
    return tuple(
        None if one is None or other is None else probe((one, train[1]), (other, test[1]))
        for one, other in zip(fitted, tested, strict=True)
    )


def check(stages: Sequence[nn.Module], train: Examples, test: Examples) -> None:
    """Raise UsageError for stages that are no modules, and for examples whose targets are no classes."""
    sequence("stages", stages, "a list of modules, such as trainer.stages")
    for index, stage in enumerate(stages):
        of_kind(f"stages[{index}]", stage, nn.Module, "an nn.Module")
    for name, pair in (("train", train), ("test", test)):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            raise UsageError(f"{name}={shown(pair)}: give a pair of tensors (x, y)")
        x, y = (with_numbers(part, f"the {letter} of {name}") for part, letter in zip(pair, "xy", strict=True))
        check_examples((x,), y, cuts=False)
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise UsageError(f"{name}: y is {shown(y)}: give classes as whole numbers from 0 on, any below for none")


def outputs(stages: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The first output tensor of each stage."""
    stage_inputs = boundaries([*stages, nn.Identity()], (x,))
    return [tensors[0] for tensors in stage_inputs[1:]]


def by_target(features: Tensor, y: Tensor) -> Tensor | None:
    """Features as [*y.shape, ...]: channels last where pixels have targets [N, H, W]; None if they do not fit."""
    if y.dim() == 3 and features.dim() == 4:
        features = features.movedim(1, -1)
    fits = features.is_floating_point() and features.dim() > y.dim() and features.shape[: y.dim()] == y.shape
    return features if fits else None


def probe(train: Examples, test: Examples) -> float:
    """The accuracy on `test` of logistic regression with a little weight decay on normalised features."""
    x, y = prepared(*train)
    unseen, wanted = prepared(*test)
    mean, deviation = x.mean(0), x.std(0).clamp_min(1e-6)
    weight = classifier((x - mean) / deviation, y, int(max(y.max(), wanted.max())) + 1)
    found = with_ones((unseen - mean) / deviation) @ weight
    return float((found.argmax(1) == wanted).double().mean())


def prepared(features: Tensor, y: Tensor) -> Examples:
    """Features [n, d] in float64 and targets [n], of those that ask for something."""
    flat = features.flatten(0, y.dim() - 1)[counted(y).flatten()].double()
    if flat.dim() == 4 and flat[0].numel() > WIDEST:
        side = max(1, int((WIDEST / flat.shape[1]) ** 0.5))
        flat = nn.functional.adaptive_avg_pool2d(flat, (min(side, flat.shape[2]), min(side, flat.shape[3])))
    return flat.flatten(1), y[counted(y)]


def classifier(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """The weights [d + 1, classes] of the least regularised cross entropy, from zero: the same every time."""
    x = with_ones(x)
    weight = torch.zeros(x.shape[1], classes, dtype=x.dtype, device=x.device, requires_grad=True)
    optimizer: Any = torch.optim.LBFGS([weight], max_iter=MOST_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(x @ weight, y) + DECAY / 2 * weight[:-1].square().sum()
        torch.autograd.backward(value)
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach()


def with_ones(x: Tensor) -> Tensor:
    """x with a column of ones, for the bias."""
    return torch.cat([x, x.new_ones(len(x), 1)], 1)
