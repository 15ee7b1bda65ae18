"""Networks to plan for without data, by name: families with options, and published sizes without any.

A network that trains takes its shapes from its data set (`stretto.models.table`). These have no data: what a data set
would say, the size of a vocabulary or the side of an image, are options of a family.

Some families share their name with a model for training. Under such a name, an option that only the family has (`side`,
`classes`) asks for the network without data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.models.core_attention import Dropout
from stretto.models.images import LEAST_SIDE, SIDE, final_side, imagenet_alexnet, imagenet_vgg
from stretto.models.model import Recipe
from stretto.models.published_network import PublishedNetwork, float32_token_loss, images, pixels, token_loss, tokens
from stretto.models.residual_block import NORMS, POSITIONS, BlockShape, EagerLinear, blocks
from stretto.models.resnet import imagenet_resnet
from stretto.models.table import MODELS
from stretto.models.transformer import Embedding, check_heads, language_model, unembedding
from stretto.models.unet import plain_unet
from stretto.options.checks import is_among, number, shown
from stretto.options.named import choose, option_names, resolve, whole


class ParallelCrossEntropy(torch.autograd.Function):
    """Logits [N, V], float32, which are overwritten, and targets [N] -> their mean cross entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        logits.sub_(logits.amax(-1, keepdim=True))
        scores = logits.gather(1, target[:, None])
        total = logits.exp_().sum(-1, keepdim=True)
        loss = (total.log() - scores).mean()
        ctx.save_for_backward(logits.div_(total), target)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The softmax less one at the target, by the mean's share of the gradient."""
        softmax, target = ctx.saved_tensors
        softmax.scatter_add_(1, target[:, None], torch.full_like(target[:, None], -1, dtype=softmax.dtype))
        return softmax.mul_(gradient / len(target)), None


def megatron_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of tokens, from logits in float32."""
    logits = output.flatten(0, 1).to(torch.float32, copy=True)
    loss: Tensor = ParallelCrossEntropy.apply(logits, target.flatten())  # type: ignore[no-untyped-call]
    return loss


class TokenStart(nn.Module):
    """Tokens int64 [N, T] -> [N, T, width]: embedded, with positions unless rotary, all of the first of `types`."""

    def __init__(self, shape: BlockShape, vocabulary: int, types: int) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, shape.context if shape.positions == "learned" else None, shape.width)
        self.token_type = nn.Embedding(types, shape.width) if types else None
        self.dropout = Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        if self.token_type is not None:
            embedded = embedded + self.token_type.weight[0]
        out: Tensor = self.dropout(embedded)
        return out


class PatchStart(nn.Module):
    """Images [N, 3, H, W] -> [N, T, width]: a token for the class, then one for each patch, with positions."""

    def __init__(self, shape: BlockShape, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, stride=patch)
        self.first = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.position = nn.Parameter(torch.empty(1, shape.context, shape.width).normal_(std=0.02))
        self.dropout = Dropout(shape.dropout)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1)
        out: Tensor = self.dropout(tokens + self.position)
        return out


class LogitsEnd(nn.Module):
    """Final norm and logits, [N, T, width] -> [N, T, V]."""

    def __init__(self, shape: BlockShape, vocabulary: int) -> None:
        super().__init__()
        self.norm = shape.normalisation()
        self.score = unembedding(vocabulary, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.score(self.norm(x))
        return logits


class MaskedTokenEnd(nn.Module):
    """Final norm; Linear, GELU and norm; logits with a bias (Devlin et al. 2019), [N, T, width] -> [N, T, V]."""

    def __init__(self, shape: BlockShape, vocabulary: int) -> None:
        super().__init__()
        self.norm = shape.normalisation()
        transform = nn.Linear if shape.fused else EagerLinear
        self.transform = nn.Sequential(transform(shape.width, shape.width), shape.activation(), shape.normalisation())
        self.score = transform(shape.width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.score(self.transform(self.norm(x)))
        return logits


class ClassifierEnd(nn.Module):
    """Final norm, and the logits of the first token, [N, T, width] -> [N, classes]."""

    def __init__(self, shape: BlockShape, classes: int) -> None:
        super().__init__()
        self.norm = shape.normalisation()
        self.score = nn.Linear(shape.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.score(self.norm(x)[:, 0])
        return logits


ATTENTIONS = ("scores", "scaled-scores", "fused", "fused-2022")
LOSSES = {"torch": float32_token_loss, "megatron": megatron_token_loss}


@dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """The options of `decoder`; GPT-2 unless said otherwise.

    kv_heads: heads of keys and values, which several heads of queries share; as many as `heads`. hidden: units of a
    block's perceptron, 4 `width`; gated: SiLU of a gate times them, as in Llama, else GELU. attention: "scores", which
    are made, dropped out and kept, "scaled-scores" by an operator of its own, "fused", or "fused-2022" by the first
    kernels. tied: the output layer's weight is the embedding's. positions: learned or rotary, norm: layer or rms.
    bias: of all linear layers but the last. fused: False runs biases, GELU, masks, dropout and sums one by one. loss:
    that of "torch", or of "megatron".
    """

    depth: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257
    kv_heads: int | None = None
    hidden: int | None = None
    attention: str = "scores"
    dropout: float = 0.1
    tied: bool = False
    positions: str = "learned"
    norm: str = "layer"
    gated: bool = False
    bias: bool = True
    fused: bool = True
    loss: str = "torch"


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(DecoderOptions):
    """The options of `encoder`; BERT unless said otherwise."""

    context: int = 512
    vocabulary: int = 30522


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """The options of `vit`; ViT-B/16 unless said otherwise. hidden, attention: as of `decoder`."""

    depth: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    side: int = 224
    classes: int = 1000
    hidden: int | None = None
    attention: str = "scores"
    dropout: float = 0.0


Options = TypeVar("Options")


def taking(record: type[Options]) -> Callable[[Callable[[Options], PublishedNetwork]], Callable[..., PublishedNetwork]]:
    """A decorator: the function of a record is called with the record's fields as keyword options."""

    def decorate(build: Callable[[Options], PublishedNetwork]) -> Callable[..., PublishedNetwork]:
        @wraps(build)
        def built(**options: Any) -> PublishedNetwork:
            return build(record(**options))

        built.__signature__ = signature(record)  # type: ignore[attr-defined]
        return built

    return decorate


@taking(DecoderOptions)
def decoder(options: DecoderOptions) -> PublishedNetwork:
    """A language model of `depth` causal blocks between an embedding and the logits of all tokens."""
    shape = block_shape("decoder", options, causal=True)
    return language("decoder", options, shape, partial(LogitsEnd, shape, options.vocabulary), types=0)


@taking(EncoderOptions)
def encoder(options: EncoderOptions) -> PublishedNetwork:
    """A masked language model, where every token attends to all.

    It has two types of tokens, no pooler, and logits of all tokens, not only of those that are masked. Norms stand
    before the branches, as in Megatron's BERT.
    """
    shape = block_shape("encoder", options, causal=False)
    return language("encoder", options, shape, partial(MaskedTokenEnd, shape, options.vocabulary), types=2)


def language(
    model: str, options: DecoderOptions, shape: BlockShape, end: Callable[[], nn.Module], *, types: int
) -> PublishedNetwork:
    owner = f"model {model!r}"
    choose(owner, "tied", options.tied, (True, False))
    whole(owner, "vocabulary", options.vocabulary)
    choose(owner, "loss", options.loss, tuple(LOSSES))
    return PublishedNetwork(
        [partial(TokenStart, shape, options.vocabulary, types), *blocks(shape), end],
        tokens(shape.context),
        tokens(shape.context),
        LOSSES[options.loss],
        tied=("embedding.token.weight", "score.weight") if options.tied else None,
        classes="score",
        counts_parts=shape.fused,
        optimizer="adam",
    )


@taking(VisionOptions)
def vit(options: VisionOptions) -> PublishedNetwork:
    """A vision transformer (Dosovitskiy et al. 2021): a token for each patch, and one more."""
    patch, side = options.patch, options.side
    for option in ("patch", "side", "classes"):
        whole("model 'vit'", option, getattr(options, option))
    if side % patch:
        raise UsageError(
            f"model 'vit': patch={patch} does not divide side={side}; "
            f"take side={-(-side // patch) * patch}, or another patch"
        )
    in_blocks = {name: getattr(options, name) for name in ("depth", "width", "heads", "hidden", "attention", "dropout")}
    shape = block_shape("vit", DecoderOptions(**in_blocks, context=(side // patch) ** 2 + 1), causal=False)
    recipe: Recipe = [partial(PatchStart, shape, patch), *blocks(shape), partial(ClassifierEnd, shape, options.classes)]
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
    "decoder": decoder,
    "encoder": encoder,
    "vit": vit,
    "resnet": resnet,
    "vgg": vgg,
    "alexnet": alexnet,
    "unet": unet,
}


def family_member(name: str, options: Mapping[str, object]) -> PublishedNetwork:
    """A network of a family. Raises UsageError for an unknown family, or an option that it does not know."""
    if not is_among(name, FAMILIES):
        raise UsageError(f"unknown family of networks {shown(name)}: {nearest(str(name), FAMILIES)}")
    resolved = resolve(f"model {name!r}, planned without data,", FAMILIES[name], options)
    network = FAMILIES[name](**resolved)
    return replace(network, options={option: value for option, value in resolved.items() if value is not None})


def block_shape(model: str, options: DecoderOptions, *, causal: bool) -> BlockShape:
    """The shape of a transformer's blocks. Raises UsageError for options that do not fit together."""
    owner = f"model {model!r}"
    width, heads = options.width, options.heads
    shared = heads if options.kv_heads is None else options.kv_heads
    units = 4 * width if options.hidden is None else options.hidden
    counts = {
        "depth": options.depth,
        "width": width,
        "heads": heads,
        "context": options.context,
        "kv_heads": shared,
        "hidden": units,
    }
    for option, value in counts.items():
        whole(owner, option, value)
    choose(owner, "attention", options.attention, ATTENTIONS)
    choose(owner, "positions", options.positions, POSITIONS)
    choose(owner, "norm", options.norm, tuple(NORMS))
    for option in ("gated", "bias", "fused"):
        choose(owner, option, getattr(options, option), (True, False))
    number(f"{owner}: dropout", options.dropout, 0, 1)
    check_heads(model, width, heads)
    if heads % shared:
        fitting = [count for count in range(1, heads + 1) if heads % count == 0]
        raise UsageError(
            f"{owner}: kv_heads={shared} does not divide heads={heads}; "
            f"take kv_heads={min(fitting, key=lambda count: abs(count - shared))}"
        )
    if options.positions != "learned" and (width // heads) % 2:
        raise UsageError(
            f"{owner}: positions={options.positions!r} turns pairs, and width={width} with heads={heads} leaves each "
            f"head {width // heads}; take width={width + heads}"
        )
    return BlockShape(
        options.depth, width, heads, shared, units, options.context, causal, options.attention,
        float(options.dropout), options.gated, options.bias, options.norm, options.positions, options.fused,
    )  # fmt: skip


def check_image(model: str, *, side: int, classes: int, least: int) -> None:
    whole(f"model {model!r}", "side", side, least=least)
    whole(f"model {model!r}", "classes", classes)


def gpt3(*, depth: int, width: int, heads: int, context: int, vocabulary: int) -> PublishedNetwork:
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
    "gpt3-small": partial(gpt3, depth=12, width=768, heads=12, context=2048, vocabulary=50257),
    "gpt3-175b": partial(gpt3, depth=96, width=12288, heads=96, context=2048, vocabulary=50257),
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
