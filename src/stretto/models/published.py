"""Published networks to plan for, by name: sizes of `stretto.models.families`, and GPT-3 as it was."""

from collections.abc import Callable, Mapping
from functools import partial

from stretto.errors import UsageError, nearest
from stretto.models.families import alexnet, resnet, vgg
from stretto.models.published_network import PublishedNetwork, token_loss, tokens
from stretto.models.transformer import language_model
from stretto.options.checks import is_among, shown


def published(name: str) -> PublishedNetwork:
    """The published network of this name. Raises UsageError for an unknown one."""
    if not is_among(name, PUBLISHED):
        raise UsageError(f"unknown network {shown(name)}: {nearest(str(name), PUBLISHED)}")
    return PUBLISHED[name]()


def language(*, depth: int, width: int, heads: int, context: int, vocabulary: int) -> PublishedNetwork:
    """A decoder-only language model, with fused attention and without dropout."""
    recipe = language_model(vocabulary, context, depth=depth, width=width, heads=heads)
    batch_size = 1536 if depth == 96 else 256
    return PublishedNetwork(
        recipe, tokens(context), tokens(context), token_loss, optimizer="adam", batch_size=batch_size
    )


PUBLISHED: Mapping[str, Callable[[], PublishedNetwork]] = {
    "alexnet-227": alexnet,
    "vgg16": partial(vgg, depth=16),
    "resnet18": partial(resnet, depth=18),
    "resnet50": partial(resnet, depth=50),
    "resnet152": partial(resnet, depth=152),
    "resnet152-4096": partial(resnet, depth=152, side=4096),
    # Brown et al. 2020, table 2.1; dense attention everywhere
    "gpt3-small": partial(language, depth=12, width=768, heads=12, context=2048, vocabulary=50257),
    "gpt3-175b": partial(language, depth=96, width=12288, heads=96, context=2048, vocabulary=50257),
}
