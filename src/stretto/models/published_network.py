"""A network that is planned for without data: its layers, an example of its input, its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.models.model import Loss, Recipe


@dataclass(frozen=True)
class PublishedNetwork:
    """A recipe for the layers; functions from a number of examples to an input batch and its target; and the loss.

    `tied` are the path of a parameter in the first layer, and that of the one in the last layer that is the same.
    `classes` is the path, in the last layer, of the layer that scores classes, where processes that share weights may
    have a part of the classes each. `counts_parts`: what such processes have is counted, not derived from the whole.
    `options` are those it was made with, `optimizer` and `batch_size` what it is usually trained with.
    """

    recipe: Recipe
    example: Callable[[int], Tensor]
    target: Callable[[int], Tensor]
    loss: Loss
    tied: tuple[str, str] | None = None
    classes: str | None = None
    counts_parts: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    optimizer: str = "sgd"
    batch_size: int = 256

    def layers(self) -> list[nn.Module]:
        """Build the layers, on the default device; on 'meta' they take no memory."""
        layers = [make() for make in self.recipe]
        if self.tied is not None:
            owner, _, name = self.tied[1].rpartition(".")
            setattr(layers[-1].get_submodule(owner), name, layers[0].get_parameter(self.tied[0]))
        return layers

    def condensed(self) -> tuple["PublishedNetwork", tuple[int, ...]]:
        """The network with no more than three equal layers in a row; and which of its layers each one here is like.

        What a layer costs depends on the one before it, and where sequences are divided on whether an equal one
        follows: those between the first and the last of equal layers are all like the second.
        """
        kept: list[Callable[[], nn.Module]] = []
        places: list[int] = []
        for _, equal in groupby(self.recipe, made_by):
            makes, first = list(equal), len(kept)
            kept += makes[:3]
            places += [first, *[first + 1] * (len(makes) - 2), first + min(len(makes) - 1, 2)][-len(makes) :]
        return replace(self, recipe=kept), tuple(places)


def made_by(make: Callable[[], nn.Module]) -> tuple[object, ...]:
    """What makes a layer, equal for equal layers."""
    return (make.func, make.args, make.keywords) if isinstance(make, partial) else (make,)


def images(recipe: Recipe, side: int, *, channels: int = 3) -> PublishedNetwork:
    """A network that classifies images of `side` x `side` pixels."""
    return PublishedNetwork(
        recipe,
        lambda examples: torch.empty(examples, channels, side, side),
        lambda examples: torch.zeros(examples, dtype=torch.int64),
        cross_entropy,
    )


def tokens(context: int) -> Callable[[int], Tensor]:
    """A batch of so many tokens an example."""
    return lambda examples: torch.zeros(examples, context, dtype=torch.int64)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of tokens, from logits as they are."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


def float32_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of tokens, from logits in float32, as large models compute it."""
    return cross_entropy(output.flatten(0, 1).float(), target.flatten())


def pixels(side: int) -> Callable[[int], Tensor]:
    return lambda examples: torch.zeros(examples, side, side, dtype=torch.int64)
