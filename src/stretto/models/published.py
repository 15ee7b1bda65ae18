"""Networks to plan for without data, by name: families with options, and published sizes without any.

Some families share their name with a model for training, which takes its shapes from a data set. Under such a name, an
option that only the family has (`side`, `classes`) asks for the network without data.
"""

from collections.abc import Callable, Mapping
from functools import partial

from stretto.errors import UsageError, nearest
from stretto.models.families import FAMILIES, alexnet, family_member, resnet, vgg
from stretto.models.published_network import PublishedNetwork, token_loss, tokens
from stretto.models.table import MODELS
from stretto.models.transformer import language_model
from stretto.options.checks import is_among, shown
from stretto.options.named import option_names


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

NETWORKS = tuple(dict.fromkeys((*FAMILIES, *PUBLISHED)))


def published(name: str) -> PublishedNetwork:
    """The published network of this name. Raises UsageError for an unknown one."""
    if not is_among(name, PUBLISHED):
        raise UsageError(f"unknown network {shown(name)}: {nearest(str(name), PUBLISHED)}")
    return PUBLISHED[name]()


def is_planned_only(name: str, options: Mapping[str, object]) -> bool:
    """Whether a model's name and options are those of a network without data, which can only be planned for.

    Raises UsageError for an option that neither the network without data nor the model of the same name has.
    """
    if name not in MODELS:
        return name in NETWORKS
    if name not in FAMILIES:
        return False
    known, shapes = option_names(MODELS[name]), shape_options(name)
    for option in options:
        if option not in (*known, *shapes):
            raise UsageError(
                f"model {name!r} has no option {option!r}; {nearest(option, (*known, *shapes))}, of which "
                f"{' and '.join(shapes)} give the shape of a network without data, which is only planned for"
            )
    return any(option in shapes for option in options)


def refuse_planned_only(name: str, options: Mapping[str, object]) -> None:
    """Raise UsageError for a network without data, where one is wanted that trains."""
    if not is_planned_only(name, options):
        return
    if name in MODELS:
        given = " and ".join(option for option in options if option in shape_options(name))
        raise UsageError(
            f"model_options: the data set says what {given} would: leave it out, or plan for model {name!r} without "
            "data, with stretto plan"
        )
    raise UsageError(
        f"model {name!r} has no data: stretto plan plans for it, and nothing trains it; choose from {', '.join(MODELS)}"
    )


def shape_options(name: str) -> tuple[str, ...]:
    """The options of a family that the model of the same name lacks, as its data set says them."""
    known = option_names(MODELS[name])
    return tuple(option for option in option_names(FAMILIES[name]) if option not in known)


def planned_network(name: str, options: Mapping[str, object]) -> PublishedNetwork:
    """A network without data. Raises UsageError for an unknown name, or options that do not fit."""
    if name in FAMILIES:
        return family_member(name, options)
    if options:
        raise UsageError(
            f"model_options: network {name!r} is as published and takes none; other sizes have {', '.join(FAMILIES)}"
        )
    return published(name)
