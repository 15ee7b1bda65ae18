"""Sharpness: the largest eigenvalue of the loss's Hessian, by power iteration on Hessian-vector products."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analysis.frozen_model import flat_gradient, frozen, outputs
from stretto.errors import UsageError
from stretto.losses import Loss, mean_and_weight
from stretto.nn.batch import Batches, first_size
from stretto.options.checks import number, whole


@dataclass(frozen=True)
class Sharpness:
    """`value` never exceeds the largest eigenvalue; if `converged`, an eigenvalue is within the tolerance of it."""

    value: float
    products: int  # of the Hessian and a vector
    converged: bool


def sharpness(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[tuple[Any, Any]],
    *,
    tolerance: float = 0.01,
    products: int = 100,
    seed: int = 0,
) -> Sharpness:
    """The largest eigenvalue of the Hessian of the mean loss over all examples of `batches`, at the model's weights.

    As in Yao et al. 2018 (arXiv 1802.08241): double backward and power iteration, from a random vector, until
    ||H v - value v|| <= tolerance |value|, or for at most `products` products. If the eigenvalue of largest size is
    negative, a second iteration, on H minus it, finds the largest one. Dropout and batch statistics are off. The graphs
    of all batches are in memory at once; a product costs about two backwards.
    """
    number("sharpness: tolerance", tolerance, 0)
    whole("sharpness: products", products, 1)
    whole("sharpness: seed", seed, -(1 << 63), (1 << 63) - 1)
    checked = Batches("sharpness", batches)
    with frozen(model) as parameters, checked.explaining_misfits():
        product = hessian(model, loss, list(checked), parameters)
        start = random_direction(parameters, seed)
        largest = iterate(product, start, tolerance, products)
        if largest.value >= 0:
            return largest
        lowest = largest.value
        above = iterate(product, start, tolerance, products, shift=lowest)
        return Sharpness(above.value, largest.products + above.products, largest.converged and above.converged)


def hessian(
    model: nn.Module, loss: Loss, batches: Sequence[tuple[Any, Any]], parameters: list[nn.Parameter]
) -> Callable[[Tensor], Tensor]:
    """A function that multiplies the Hessian and a vector over all parameters."""
    if not sum(first_size(x) for x, _ in batches):
        raise UsageError("sharpness got no examples: the iterable of batches is empty (a used-up generator?)")
    values = [mean_and_weight(loss, outputs(model, x), y, first_size(x)) for x, y in batches]
    whole = sum(weight for _, weight in values)
    gradients = [
        (weight / whole, flat_gradient(value, parameters, differentiable=True)) for value, weight in values if weight
    ]

    def product(vector: Tensor) -> Tensor:
        image = torch.zeros_like(vector)
        for share, gradient in gradients:
            if gradient.requires_grad:  # else the loss is linear there
                image.add_(flat_gradient(gradient @ vector, parameters, keep=True), alpha=share)
        return image

    return product


def random_direction(parameters: Sequence[Tensor], seed: int) -> Tensor:
    """A random vector of length 1 over all parameters, the same on every device."""
    draw = torch.Generator("cpu").manual_seed(seed)
    vector = torch.randn(sum(parameter.numel() for parameter in parameters), generator=draw, dtype=torch.float64)
    vector /= vector.norm()
    return vector.to(parameters[0].device, parameters[0].dtype)


def iterate(
    product: Callable[[Tensor], Tensor], vector: Tensor, tolerance: float, products: int, shift: float = 0.0
) -> Sharpness:
    """Power iteration on H - shift: the eigenvalue furthest from shift, as the Rayleigh quotient of the last vector."""
    value = 0.0
    for count in range(1, products + 1):
        image = product(vector)
        value = float(vector @ image)
        if float((image - value * vector).norm()) <= tolerance * abs(value):
            return Sharpness(value, count, converged=True)
        image -= shift * vector
        length = float(image.norm())
        if not length:
            return Sharpness(value, count, converged=True)
        vector = image / length
    return Sharpness(value, products, converged=False)
