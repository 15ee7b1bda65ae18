"""The tensors in a Hugging Face folder's safetensors files, read one by one, under the names of a model's state.

transformers renames tensors of older files as it loads them, and joins or parts some (experts of a mixture); which and
how is asked of transformers.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.files.path_names import in_path

INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass
class Recipe:
    """Where a tensor of a model comes from: stored tensors, and what makes it of them; None if it is the stored one.

    `sources` are (the converter's pattern, stored name); `key` is the name by which the converter knows them all.
    """

    converter: Any = None
    key: str = ""
    sources: list[tuple[str, str]] = field(default_factory=list)


class StoredWeights:
    """The tensors in a folder's safetensors files, by the names of a model's state; empty without such files."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._folder, self._model = folder, model
        self._file_of = files_of(folder)
        self._recipes = self._match() if self._file_of else {}
        self._check_shapes()

    def __bool__(self) -> bool:
        return bool(self._recipes)

    def __contains__(self, name: str) -> bool:
        return name in self._recipes

    def read(self, name: str, like: Tensor) -> Tensor:
        """The tensor of this name, with the dtype of `like`. Raises UsageError if its shape is another."""
        recipe = self._recipes[name]
        value = self._converted(recipe)[name] if recipe.converter is not None else self._stored(recipe.sources[0][1])
        self._check(recipe, value.shape, like.shape)
        return torch.empty(like.shape, dtype=like.dtype).copy_(value)

    def read_small(self) -> None:
        """Read the tensors of the model's state that are on the CPU: norms, biases, statistics."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if not tensor.is_meta and name in self:
                tensor.data = self.read(name, tensor)

    def _check_shapes(self) -> None:
        """Raise UsageError for a stored tensor that has another shape than the model's; no tensor is read."""
        from safetensors import safe_open

        state = self._model.state_dict(keep_vars=True)
        for file in sorted(set(self._file_of.values())):
            with safe_open(self._folder / file, framework="pt") as tensors:
                for name, recipe in self._recipes.items():
                    stored = recipe.sources[0][1]
                    if recipe.converter is None and self._file_of[stored] == file:
                        self._check(recipe, tensors.get_slice(stored).get_shape(), state[name].shape)

    def _check(self, recipe: Recipe, there: Sequence[int], here: Sequence[int]) -> None:
        if list(there) != list(here):
            stored = ", ".join(stored for _, stored in recipe.sources)
            raise UsageError(
                f"{self._folder / self._file_of[recipe.sources[0][1]]}: {stored} is {list(there)}, but the model that "
                f"{self._folder / 'config.json'} describes has {list(here)} there"
            )

    def _stored(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._folder / self._file_of[name], framework="pt") as tensors:
            value: Tensor = tensors.get_tensor(name)
            return value

    def _converted(self, recipe: Recipe) -> dict[str, Tensor]:
        converter = copy.deepcopy(recipe.converter)
        for pattern, stored in recipe.sources:
            converter.add_tensor(recipe.key, stored, pattern, partial(self._stored, stored))
        made = converter.convert(recipe.key, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _match(self) -> dict[str, Recipe]:
        """The recipe of each tensor of the model's state that the files have."""
        state = self._model.state_dict(keep_vars=True)
        recipes: dict[str, Recipe] = {}
        unknown: list[str] = []
        for stored, name, pattern, converter in self._renamed(state):
            if name not in state:
                unknown.append(stored)
                continue
            recipe = recipes.setdefault(name, Recipe(converter, name))
            recipe.sources.append((pattern, stored))
            if converter is not None:
                first, *others = converter.target_patterns
                recipes |= {name.replace(first, other): recipe for other in others}
        found = {id(state[name]) for name in recipes if name in state}
        missing = [name for name, tensor in state.items() if id(tensor) not in found]
        if missing and unknown:
            raise UsageError(
                f"the weights in {self._folder} do not fit {type(self._model).__name__}: {len(missing)} of its tensors "
                f"are missing ({missing[0]}, ...), and {len(unknown)} are no part of it ({unknown[0]}, ...). Write the "
                "folder anew, transformers.AutoModel...from_pretrained(FOLDER).save_pretrained(OTHER), or correct "
                '"architectures" in config.json'
            )
        return recipes

    def _renamed(self, state: dict[str, Tensor]) -> Iterator[tuple[str, str, str, Any]]:
        """Each stored name with the model's, and the pattern and converter that make another tensor of it, if any."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        transforms = get_model_conversion_mapping(self._model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self._model.base_model_prefix  # which the files of a base model lack
        for stored in sorted(self._file_of, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, state)
            if name not in state and stored in state:
                name, pattern = stored, None
            yield stored, name, pattern or "", None if pattern is None else by_pattern[pattern]


def files_of(folder: Path) -> dict[str, str]:
    """The file of each tensor in a folder's safetensors files; none where there are no such files.

    Raises UsageError where the weights are in files that only pickle reads, and for an index or a file that is damaged.
    """
    if (folder / INDEX).is_file():
        return indexed(folder)
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != "heads.safetensors")
    pickled = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
    if not files and pickled:
        raise UsageError(
            f"the weights in {folder} are in {pickled[0]}, which may hold code: write them as safetensors, "
            "transformers.AutoModel...from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    return {name: path.name for path in files for name in names_in(path)}


def indexed(folder: Path) -> dict[str, str]:
    """The file of each tensor, as a folder's index says. Raises UsageError for one that is damaged, or leads out."""
    index = folder / INDEX
    try:
        named: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not isinstance(named, dict):
            raise TypeError("weight_map is no table")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    for tensor, file in named.items():
        in_path(file, f"{index}: the file of {tensor!r}")
    for file in sorted(set(named.values())):
        if not (folder / file).is_file():
            raise UsageError(f"{index} names {file}, which is not there: copy the folder whole")
        there = names_in(folder / file)
        if lacking := [tensor for tensor, other in named.items() if other == file and tensor not in there]:
            raise UsageError(f"{index} has {lacking[0]!r} in {file}, which lacks it: copy the folder whole")
    return named


def names_in(path: Path) -> set[str]:
    """The names of the tensors in a safetensors file. Raises UsageError if it is damaged."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as tensors:
            return {*tensors.keys()}
    except Exception as error:  # safetensors has an error class of its own
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from error
