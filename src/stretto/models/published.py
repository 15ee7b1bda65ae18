"""Published networks to plan for: their layers and an example of their input, without data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.errors import UsageError, nearest
from stretto.models.alexnet import SIDE, imagenet_alexnet
from stretto.models.model import Loss, Recipe
from stretto.models.resnet import imagenet_resnet
from stretto.models.transformer import language_model
from stretto.models.vgg import imagenet_vgg
from stretto.options.checks import is_among, shown


@dataclass(frozen=True)
class PublishedNetwork:
    """A recipe for the layers; functions from a number of examples to an input batch and its target; and the loss."""

    recipe: Recipe
    example: Callable[[int], Tensor]
    target: Callable[[int], Tensor]
    loss: Loss

    def layers(self) -> list[nn.Module]:
        """Build the layers, on the default device; on 'meta' they take no memory."""
        return [make() for make in self.recipe]


def published(name: str) -> PublishedNetwork:
    """The published network of this name. Raises UsageError for an unknown one."""
    if not is_among(name, PUBLISHED):
        raise UsageError(f"unknown network {shown(name)}: {nearest(str(name), PUBLISHED)}")
    return PUBLISHED[name]()


def images(recipe: Recipe, side: int) -> PublishedNetwork:
    """A network that classifies images of `side` x `side` pixels."""
    return PublishedNetwork(
        recipe,
        lambda examples: torch.empty(examples, 3, side, side),
        lambda examples: torch.zeros(examples, dtype=torch.int64),
        cross_entropy,
    )


def language(*, depth: int, width: int, heads: int, context: int, vocabulary: int) -> PublishedNetwork:
    """A decoder-only language model."""

    def tokens(examples: int) -> Tensor:
        return torch.zeros(examples, context, dtype=torch.int64)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    recipe = language_model(vocabulary, context, depth=depth, width=width, heads=heads)
    return PublishedNetwork(recipe, tokens, tokens, loss)


PUBLISHED: Mapping[str, Callable[[], PublishedNetwork]] = {
    "alexnet-227": lambda: images(imagenet_alexnet(), SIDE),
    "vgg16": lambda: images(imagenet_vgg(depth=16), 224),
    "resnet18": lambda: images(imagenet_resnet(depth=18), 224),
    "resnet50": lambda: images(imagenet_resnet(depth=50), 224),
    "resnet152": lambda: images(imagenet_resnet(depth=152), 224),
    "resnet152-4096": lambda: images(imagenet_resnet(depth=152), 4096),
    # Brown et al. 2020, table 2.1; dense attention everywhere
    "gpt3-small": partial(language, depth=12, width=768, heads=12, context=2048, vocabulary=50257),
    "gpt3-175b": partial(language, depth=96, width=12288, heads=96, context=2048, vocabulary=50257),
}
