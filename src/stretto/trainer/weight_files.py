"""Weights as safetensors, a file a stage, with an index as Hugging Face's folders have it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import shown
from stretto.options.user_errors import called
from stretto.system.destinations import replacing, write_whole

NAMES = "a function of a weight's name that returns its name in the files, another one for each, or None"
INDEX = "model.safetensors.index.json"
SIZE = "bytes of "  # before a name: its tensor's size, as rank 0 is told


def file_of(stage: int, num_stages: int) -> str:
    return f"model-{stage + 1:05d}-of-{num_stages:05d}.safetensors"


def write_part(
    folder: Path, stage: int, num_stages: int, weights: Mapping[str, Tensor], names: Callable[[str], str | None] | None
) -> dict[str, Tensor]:
    """Write the file of a stage; return the bytes of each tensor in it, under its name behind SIZE."""
    tensors: dict[str, Tensor] = {}
    for key, value in weights.items():
        name = key if names is None else called("write_weights: names", names, key, wanted=NAMES)
        if name in tensors or not isinstance(name, str | None):
            raise UsageError(f"write_weights: names({key!r}) is {shown(name)}: give {NAMES}")
        if name is not None:
            tensors[name] = value.detach().cpu().contiguous()
    with replacing(folder / file_of(stage, num_stages)) as file:
        mode = file.stat().st_mode
        save_file(apart(tensors), file, metadata={"format": "pt"})  # which nobody but this user could read
        file.chmod(mode)
    return {SIZE + name: torch.tensor(value.nbytes) for name, value in tensors.items()}


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where safetensors would refuse them: parts of a larger storage, and tied ones."""
    storages: set[int] = set()
    copied = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        copied[name] = tensor if alone else tensor.clone()
        storages.add(storage.data_ptr())
    return copied


def write_index(folder: Path, written: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Write the index of all stages' files, from what `write_part` returned for each stage."""
    sizes = {
        (stage, key.removeprefix(SIZE)): int(size)
        for stage, state in written.items()
        for key, size in state.items()
        if key.startswith(SIZE)
    }
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {name: file_of(stage, len(written)) for stage, name in sizes},
    }
    write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")
