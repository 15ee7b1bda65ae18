"""The built-in models by name, and the function that builds one."""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stretto.data import Dataset
from stretto.errors import UsageError
from stretto.losses import CrossEntropy, mean, token_cross_entropy
from stretto.models.encoder_decoder import encoder_decoder
from stretto.models.images import alexnet, cnn, vgg
from stretto.models.mlp import mlp
from stretto.models.model import Loss, Model, Recipe
from stretto.models.resnet import cifar_resnet, resnet
from stretto.models.transformer import transformer
from stretto.models.unet import unet
from stretto.nn import memory_limit
from stretto.nn.batch import IGNORED
from stretto.nn.seeding import derive
from stretto.options.checks import is_among, of_kind
from stretto.options.checks import whole as check_whole
from stretto.options.import_object import unknown
from stretto.options.named import resolve, whole

MODELS: Mapping[str, Callable[..., Recipe]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet": alexnet,
    "vgg": vgg,
    "resnet": resnet,
    "cifar-resnet": cifar_resnet,
    "unet": unet,
    "transformer": transformer,
    "encoder-decoder": encoder_decoder,
}

_TASKS = dict.fromkeys(MODELS, "classification") | {
    "transformer": "language",
    "encoder-decoder": "translation",
    "unet": "segmentation",
}


def padded_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of padded targets: the mean over examples of the mean over the tokens of an example.

    output [N, T, V], target int64 [N, T]. It is a mean over examples, so the losses of micro-batches average to that of
    their minibatch, whatever the lengths of their examples.
    """
    losses = cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    return (losses.sum(1) / (target != IGNORED).sum(1)).mean()


_LOSSES: Mapping[str, Loss] = {
    "classification": CrossEntropy(),
    "language": token_cross_entropy,
    "translation": mean(padded_cross_entropy),
    "segmentation": CrossEntropy(),
}


def build(name: str, dataset: Dataset, *, seed: int = 0, **options: object) -> Model:
    """Build the model `name` for the shapes and classes of `dataset`, on the CPU.

    Options are the keyword arguments of the function in `MODELS`. The initial weights of block i depend on `seed` and
    i only: not on the blocks before it, nor on how many workers hold them. The global random state stays as it was.
    Raises `UsageError` for an unknown model or option, or one that does not fit the data.
    """
    if not is_among(name, MODELS):
        raise unknown("model", name, MODELS)
    of_kind("dataset", dataset, Dataset, "what stretto.data.load(name) returned")
    check_whole("seed", seed)
    if dataset.task != _TASKS[name]:
        fitting = ", ".join(model for model, task in _TASKS.items() if task == dataset.task)
        raise UsageError(
            f"model {name!r} is for {_TASKS[name]}, but data set {dataset.name!r} is for {dataset.task}; "
            f"for this data set take one of: {fitting}; or take a data set for {_TASKS[name]}"
        )
    resolved = resolve(f"model {name!r}", MODELS[name], options)
    for option, value in resolved.items():
        if not isinstance(inspect.signature(MODELS[name]).parameters[option].default, str):  # all others are counts
            whole(f"model {name!r}", option, value)
    recipe = MODELS[name](dataset, **resolved)
    chosen = ", ".join(f"{option} {value}" for option, value in resolved.items())
    with memory_limit.Allowance(f"model {name!r} ({chosen})"):
        layers = [_seeded(make, derive(seed, "model", i)) for i, make in enumerate(recipe)]
    size = sum(p.numel() for layer in layers for p in layer.parameters())
    return Model(name, layers, _LOSSES[dataset.task], f"{name} ({chosen}) for {dataset.name}: {size:,} parameters")


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make a block under its own seed. torch.manual_seed would also seed GPUs, whose state is not restored here."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()
