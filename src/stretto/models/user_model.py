"""The user's own model, made by a function in a file or a package."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.errors import UsageError
from stretto.models.hugging_face import example_of, hugging_face_model
from stretto.models.model import Loss, Model
from stretto.nn.seeding import derive
from stretto.options.checks import shown
from stretto.options.import_object import call, is_model_folder

RETURNED = (
    "an nn.Module, a list of layers, or (module, example) with one input batch, a tensor, a tuple or a dict of tensors"
)


def user_model(text: str, options: Mapping[str, Any] | None = None) -> tuple[nn.Module | list[nn.Module], Any]:
    """Call the function `package.module:function` or `path/to/file.py:function` with its options.

    Returns the module, or the layers, and the example input that the function returned with it, or None. Of hf:FOLDER,
    the model with placeholders for its weights. Raises UsageError if there is no such function, if it raises an error,
    or if it returns anything but RETURNED.
    """
    if is_model_folder(text):
        model, _ = hugging_face_model(text, options or {})
        return model, example_of(model)
    result = call(text, "model", options or {})
    model, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    layers = list(model) if isinstance(model, list | tuple | nn.ModuleList) else None
    if layers is not None and layers and all(isinstance(layer, nn.Module) for layer in layers) and is_example(example):
        return layers, example
    if not isinstance(model, nn.Module) or not is_example(example):
        raise UsageError(f"{text} returned {shown(result)}: return {RETURNED}")
    return model, example


def is_example(example: Any) -> bool:
    """Whether a value is an input batch, or None for none."""
    if isinstance(example, Mapping):
        return all(isinstance(part, Tensor) for part in example.values())
    parts: Sequence[Any] = example if isinstance(example, tuple) else (example,)
    return example is None or all(isinstance(part, Tensor) for part in parts)


def build_folder_model(text: str, options: Mapping[str, Any], loss: Loss, data: str, seed: int) -> Model:
    """The Hugging Face model of hf:FOLDER, with placeholders for its weights. Raises UsageError if it is none."""
    module, weights = hugging_face_model(text, options, seed)
    size = sum(p.numel() for p in module.parameters())
    given = ", ".join(f"{option} {value}" for option, value in options.items())
    name = f"{text} ({type(module).__name__}{', ' if given else ''}{given})"
    origin = "its files" if not weights.drawn else "its files and a seed" if weights.stored else "a seed"
    return Model(
        text, [module], loss, f"{name} for {data}: {size:,} parameters, from {origin}", module, bool(weights.drawn)
    )


def build_user_model(text: str, options: Mapping[str, Any], loss: Loss, data: str, seed: int) -> Model:
    """The user's model as a run trains it: made under a seed of its own, on the CPU, and checked.

    `data` is the name of its data set, for the description. Raises UsageError as `user_model` does, and for a model
    without weights to train or with weights on the meta device.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(derive(seed, "model"))
        made, _ = user_model(text, options)
    module = made if isinstance(made, nn.Module) else None
    layers = [made] if isinstance(made, nn.Module) else made
    parameters = {id(p): p for layer in layers for p in layer.parameters()}
    if not any(p.requires_grad for p in parameters.values()):
        raise UsageError(
            f"{text} returned a model without parameters to train: set requires_grad, or add a layer that has some"
        )
    if any(p.is_meta for p in parameters.values()):
        raise UsageError(f"{text} returned a model on the meta device, which holds no numbers: build it on the CPU")
    if any(is_lazy(p) for p in parameters.values()):
        raise UsageError(
            f"{text} returned a model with lazy parameters, which have no shapes yet: call it once on a batch first"
        )
    size = sum(p.numel() for p in parameters.values())
    given = ", ".join(f"{option} {value}" for option, value in options.items())
    name = f"{text} ({given})" if given else text
    return Model(text, layers, loss, f"{name} for {data}: {size:,} parameters", module)
