"""Families of networks to plan for: functions from options, the shapes of a network, to a `PublishedNetwork`.

A network that trains takes its shapes from its data set (`stretto.models.table`). These have no data: what a data set
would say, the size of a vocabulary or the side of an image, are options.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch import nn

from stretto.errors import UsageError, nearest
from stretto.models.alexnet import LEAST_SIDE, SIDE, final_side, imagenet_alexnet
from stretto.models.megatron_loss import megatron_token_loss
from stretto.models.model import Recipe
from stretto.models.network_ends import ClassifierEnd, LogitsEnd, MaskedTokenEnd, PatchStart, TokenStart
from stretto.models.published_network import PublishedNetwork, float32_token_loss, images, pixels, tokens
from stretto.models.residual_block import NORMS, POSITIONS, BlockShape, blocks
from stretto.models.resnet import imagenet_resnet
from stretto.models.transformer import check_heads
from stretto.models.unet import plain_unet
from stretto.models.vgg import imagenet_vgg
from stretto.options.checks import is_among, number, shown
from stretto.options.named import choose, resolve, whole

ATTENTIONS = ("scores", "scaled-scores", "fused", "fused-2022")
LOSSES = {"torch": float32_token_loss, "megatron": megatron_token_loss}


def decoder(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    context: int = 1024,
    vocabulary: int = 50257,
    kv_heads: int | None = None,
    hidden: int | None = None,
    attention: str = "scores",
    dropout: float = 0.1,
    tied: bool = False,
    positions: str = "learned",
    norm: str = "layer",
    gated: bool = False,
    bias: bool = True,
    fused: bool = True,
    loss: str = "torch",
) -> PublishedNetwork:
    """A language model of `depth` causal blocks between an embedding and the logits of all tokens; GPT-2 unless said.

    kv_heads: heads of keys and values, which several heads of queries share; as many as `heads`. hidden: units of a
    block's perceptron, 4 `width`; gated: SiLU of a gate times them, as in Llama, else GELU. attention: "scores", which
    are made, dropped out and kept, "scaled-scores" by an operator of its own, "fused", or "fused-2022" by the first
    kernels. tied: the output layer's weight is the embedding's. positions: learned or rotary, norm: layer or rms.
    bias: of all linear layers but the last. fused: False runs biases,
    GELU, masks, dropout and sums one by one. loss: that of "torch", or of "megatron".
    """
    shape = block_shape(
        "decoder", depth=depth, width=width, heads=heads, context=context, kv_heads=kv_heads, hidden=hidden,
        attention=attention, dropout=dropout, positions=positions, norm=norm, gated=gated, bias=bias,
        fused=fused, causal=True,
    )  # fmt: skip
    end = partial(LogitsEnd, shape, vocabulary)
    return language(shape, vocabulary, end, tied=checked(tied, "decoder"), types=0, loss=loss)


def encoder(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    context: int = 512,
    vocabulary: int = 30522,
    kv_heads: int | None = None,
    hidden: int | None = None,
    attention: str = "scores",
    dropout: float = 0.1,
    tied: bool = False,
    positions: str = "learned",
    norm: str = "layer",
    gated: bool = False,
    bias: bool = True,
    fused: bool = True,
    loss: str = "torch",
) -> PublishedNetwork:
    """A masked language model, where every token attends to all; BERT unless said otherwise. Options as of `decoder`.

    It has two types of tokens, no pooler, and logits of all tokens, not only of those that are masked. Norms stand
    before the branches, as in Megatron's BERT.
    """
    shape = block_shape(
        "encoder", depth=depth, width=width, heads=heads, context=context, kv_heads=kv_heads, hidden=hidden,
        attention=attention, dropout=dropout, positions=positions, norm=norm, gated=gated, bias=bias, fused=fused,
        causal=False,
    )  # fmt: skip
    end = partial(MaskedTokenEnd, shape, vocabulary)
    return language(shape, vocabulary, end, tied=checked(tied, "encoder"), types=2, loss=loss)


def language(
    shape: BlockShape, vocabulary: int, end: Callable[[], nn.Module], *, tied: bool, types: int, loss: str
) -> PublishedNetwork:
    """A network of tokens, ending in `end`."""
    owner = f"model {'decoder' if shape.causal else 'encoder'!r}"
    whole(owner, "vocabulary", vocabulary)
    choose(owner, "loss", loss, tuple(LOSSES))
    recipe: Recipe = [partial(TokenStart, shape, vocabulary, types), *blocks(shape), end]
    return PublishedNetwork(
        recipe, tokens(shape.context), tokens(shape.context), LOSSES[loss],
        tied=("embedding.token.weight", "score.weight") if tied else None, classes="score", counts_parts=shape.fused,
        optimizer="adam",
    )  # fmt: skip


def vit(
    *,
    depth: int = 12,
    width: int = 768,
    heads: int = 12,
    patch: int = 16,
    side: int = 224,
    classes: int = 1000,
    hidden: int | None = None,
    attention: str = "scores",
    dropout: float = 0.0,
) -> PublishedNetwork:
    """A vision transformer (Dosovitskiy et al. 2021), ViT-B/16 unless said otherwise: a token a patch and one more.

    attention: as of `decoder`.
    """
    for option, value in (("patch", patch), ("side", side), ("classes", classes)):
        whole("model 'vit'", option, value)
    if side % patch:
        raise UsageError(
            f"model 'vit': patch={patch} does not divide side={side}; "
            f"take side={-(-side // patch) * patch}, or another patch"
        )
    shape = block_shape(
        "vit", depth=depth, width=width, heads=heads, context=(side // patch) ** 2 + 1, hidden=hidden,
        attention=attention, dropout=dropout, causal=False,
    )  # fmt: skip
    recipe: Recipe = [
        partial(PatchStart, shape, patch),
        *blocks(shape),
        partial(ClassifierEnd, shape, classes),
    ]
    return replace(images(recipe, side), optimizer="adam", counts_parts=True)


def resnet(
    *, depth: int = 50, width: int = 1, side: int = 224, classes: int = 1000, norm: str = "batch"
) -> PublishedNetwork:
    """A ResNet (He et al. 2016); `width` multiplies the channels of 3x3 convolutions, as in wide ResNets."""
    check_image("resnet", side=side, classes=classes, least=32)
    whole("model 'resnet'", "width", width)
    return images(imagenet_resnet(depth=depth, classes=classes, norm=norm, factor=width), side)


def vgg(
    *,
    depth: int = 16,
    side: int = 224,
    classes: int = 1000,
    norm: str = "none",
    hidden: int = 4096,
    convolutional: bool = False,
) -> PublishedNetwork:
    """A VGG (Simonyan and Zisserman 2015); `convolutional`: its first two linear layers are convolutions, as timm's."""
    check_image("vgg", side=side, classes=classes, least=32)
    whole("model 'vgg'", "hidden", hidden)
    choose("model 'vgg'", "convolutional", convolutional, (True, False))
    recipe = imagenet_vgg(
        depth=depth, norm=norm, hidden=hidden, area=(side // 32) ** 2, classes=classes, convolutional=convolutional
    )
    return images(recipe, side)


def alexnet(*, side: int = SIDE, classes: int = 1000, hidden: int = 4096) -> PublishedNetwork:
    """AlexNet (Krizhevsky et al. 2012)."""
    check_image("alexnet", side=side, classes=classes, least=LEAST_SIDE)
    whole("model 'alexnet'", "hidden", hidden)
    return images(imagenet_alexnet(area=final_side(side) ** 2, hidden=hidden, classes=classes), side)


def unet(*, depth: int = 4, width: int = 64, side: int = 512, classes: int = 2, norm: str = "none") -> PublishedNetwork:
    """A U-Net (Ronneberger et al. 2015) for images of one channel; every pixel has a class."""
    for option, value in (("depth", depth), ("width", width)):
        whole("model 'unet'", option, value)
    check_image("unet", side=side, classes=classes, least=2**depth)
    if side % 2**depth:
        raise UsageError(
            f"model 'unet': depth={depth} halves images {depth} times, and side={side}; take "
            f"side={-(-side // 2**depth) * 2**depth}, or a smaller depth"
        )
    network = images(plain_unet(depth=depth, width=width, norm=norm, channels=1, classes=classes), side, channels=1)
    return replace(network, target=pixels(side))


FAMILIES: Mapping[str, Callable[..., PublishedNetwork]] = {
    "decoder": decoder, "encoder": encoder, "vit": vit, "resnet": resnet, "vgg": vgg, "alexnet": alexnet, "unet": unet,
}  # fmt: skip


def family_member(name: str, options: Mapping[str, object]) -> PublishedNetwork:
    """A network of a family. Raises UsageError for an unknown family, or an option that it does not know."""
    if not is_among(name, FAMILIES):
        raise UsageError(f"unknown family of networks {shown(name)}: {nearest(str(name), FAMILIES)}")
    resolved = resolve(f"model {name!r}, planned without data,", FAMILIES[name], options)
    network = FAMILIES[name](**resolved)
    return replace(network, options={option: value for option, value in resolved.items() if value is not None})


def block_shape(
    model: str,
    *,
    depth: int,
    width: int,
    heads: int,
    context: int,
    causal: bool,
    attention: str,
    dropout: float,
    hidden: int | None = None,
    kv_heads: int | None = None,
    positions: str = "learned",
    norm: str = "layer",
    gated: bool = False,
    bias: bool = True,
    fused: bool = True,
) -> BlockShape:
    """The shape of a transformer's blocks. Raises UsageError for options that do not fit together."""
    owner = f"model {model!r}"
    shared, units = heads if kv_heads is None else kv_heads, 4 * width if hidden is None else hidden
    counts = {"depth": depth, "width": width, "heads": heads, "context": context, "kv_heads": shared, "hidden": units}
    for option, value in counts.items():
        whole(owner, option, value)
    choose(owner, "attention", attention, ATTENTIONS)
    choose(owner, "positions", positions, POSITIONS)
    choose(owner, "norm", norm, tuple(NORMS))
    for option, value in {"gated": gated, "bias": bias, "fused": fused}.items():
        choose(owner, option, value, (True, False))
    number(f"{owner}: dropout", dropout, 0, 1)
    check_heads(model, width, heads)
    if heads % shared:
        fitting = [count for count in range(1, heads + 1) if heads % count == 0]
        raise UsageError(
            f"{owner}: kv_heads={shared} does not divide heads={heads}; "
            f"take kv_heads={min(fitting, key=lambda count: abs(count - shared))}"
        )
    if positions != "learned" and (width // heads) % 2:
        raise UsageError(
            f"{owner}: positions={positions!r} turns pairs, and width={width} with heads={heads} leaves each head "
            f"{width // heads}; take width={width + heads}"
        )
    return BlockShape(
        depth, width, heads, shared, units, context, causal, attention, float(dropout), gated, bias, norm,
        positions, fused,
    )  # fmt: skip


def check_image(model: str, *, side: int, classes: int, least: int) -> None:
    """Refuse a side below `least`, and no classes."""
    whole(f"model {model!r}", "side", side, least=least)
    whole(f"model {model!r}", "classes", classes)


def checked(tied: bool, model: str) -> bool:
    """Whether weights are tied; refuse what is neither True nor False."""
    choose(f"model {model!r}", "tied", tied, (True, False))
    return tied
