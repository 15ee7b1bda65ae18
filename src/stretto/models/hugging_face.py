"""Models of Hugging Face's from a folder: config.json, and weights from safetensors where they are there.

No weight takes memory before the process that holds its stage reads it, or draws it.
"""

import copy
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.nn.deferred import defer
from stretto.nn.seeding import PreservedGenerator, derive
from stretto.options.import_object import FOLDER
from stretto.system.path_names import in_path

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

    def read(self, name: str, like: Tensor, *, mapped: bool = False) -> Tensor:
        """The tensor of this name, with the dtype of `like`; `mapped`: in its file, where it needs no conversion.

        Raises UsageError if its shape is another.
        """
        recipe = self._recipes[name]
        value = self._converted(recipe)[name] if recipe.converter is not None else self._stored(recipe.sources[0][1])
        self._check(recipe, value.shape, like.shape)
        if mapped and value.dtype is like.dtype:
            return value
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
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

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
        return indexed(folder / INDEX)
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != "heads.safetensors")
    pickled = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
    if not files and pickled:
        raise UsageError(
            f"the weights in {folder} are in {pickled[0]}, which may hold code: write them as safetensors, "
            "transformers.AutoModel...from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    return {name: path.name for path in files for name in names_in(path)}


def indexed(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says. Raises UsageError for one that is damaged, or leads out."""
    folder = index.parent
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


CONFIG = "config.json"
SAMPLES, SAMPLE = 64, 65536  # pieces of a file of weights that its digest reads, and the bytes of one
TO_BE_LEFT = "_is_hf_initialized"  # a tensor with this attribute set is left alone by transformers
LARGE = 4096  # elements of a parameter that is read or drawn in its own process; what is smaller is there at once
OLDEST = 5  # major version of transformers
EXAMPLES, LENGTH = 2, 64  # of an example that stands in for data


def folder_of(text: str) -> Path:
    """The folder that hf:FOLDER names. Raises UsageError for one without a configuration."""
    folder = Path(text.removeprefix(FOLDER))
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"model {text}: there is no {folder / CONFIG}; give a folder that save_pretrained wrote, or one with a "
            "config.json alone for a model that is trained from the start"
        )
    return folder


def hugging_face_model(text: str, options: Mapping[str, Any], seed: int = 0) -> "tuple[nn.Module, WeightSource]":
    """The model of hf:FOLDER with placeholders for its weights, and what fills them.

    `options` change entries of its configuration.

    What is small (norms, biases) is there at once. `seed` decides the weights that no file has. Raises
    UsageError for a folder that is no such model, and for weights that do not fit it.
    """
    folder = folder_of(text)
    config = configuration(folder, options)
    kind = class_of(config, folder)
    with PreservedGenerator(torch.device("cpu")) as generator, large_on_meta():
        generator.seed(derive(seed, "model"))
        try:
            model: nn.Module = kind._from_config(config, dtype=torch.float32)
        except Exception as error:  # whatever a model makes of values of the wrong kind
            raise UsageError(
                f"{folder / CONFIG} makes no {kind.__name__} ({type(error).__name__}: {error}): correct its values"
            ) from error
    stored = StoredWeights(folder, model)
    stored.read_small()
    weights = WeightSource(model, stored, derive(seed, "weights"))
    defer(model, weights)
    return model, weights


def example_of(model: Any) -> dict[str, Tensor]:
    """A small input batch for a Hugging Face model. Raises UsageError where its shape is not known."""
    config: Any = model.config
    name: str = model.main_input_name
    if name == "input_ids":
        longest = getattr(config, "max_position_embeddings", LENGTH)
        return {name: torch.zeros(EXAMPLES, min(LENGTH, longest), dtype=torch.long)}
    if name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        side = config.image_size
        return {name: torch.zeros(EXAMPLES, getattr(config, "num_channels", 3), side, side)}
    raise UsageError(f"the shape of {name!r}, the input of {type(model).__name__}, is not known: give --data")


def configuration(folder: Path, options: Mapping[str, Any]) -> Any:
    """The configuration in a folder, with entries changed. Raises UsageError for one that cannot be read."""
    try:
        from transformers import AutoConfig, __version__
    except ImportError as error:
        raise UsageError(f"model hf:{folder} needs transformers: pip install transformers ({error})") from None
    if int(__version__.split(".")[0]) < OLDEST:
        raise UsageError(f"model hf:{folder} needs transformers {OLDEST} or newer; {__version__} is installed")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of values of the wrong kind
        raise UsageError(f"{folder / CONFIG} is no configuration that transformers knows: {error}") from error
    for name, value in options.items():
        if not hasattr(config, name):
            raise UsageError(f"model_options: {folder / CONFIG} has no {name!r}: {nearest(name, config.to_dict())}")
        setattr(config, name, value)
    return config


def class_of(config: Any, folder: Path) -> Any:
    """The class that the configuration names. Raises UsageError if it names none that transformers has."""
    import transformers

    names = config.architectures or []
    texts = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    known = [name for name in texts if hasattr(transformers, name)]
    if not known:
        said = f"architectures={names!r}" if names else "no architectures"
        raise UsageError(
            f"{folder / CONFIG} has {said}: let it name a class of transformers, "
            '"architectures": ["LlamaForCausalLM"], as save_pretrained does'
        )
    return getattr(transformers, known[0])


@contextmanager
def large_on_meta() -> Iterator[None]:
    """Large parameters go to the meta device as soon as a module registers them."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.numel() >= LARGE and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class WeightSource:
    """Gives placeholders their values: from a folder's files, else as the model initialises them, by a seed."""

    def __init__(self, model: nn.Module, stored: StoredWeights, seed: int) -> None:
        self._model, self.stored, self._seed = model, stored, seed
        self._names: dict[int, list[str]] | None = None

    @property
    def drawn(self) -> list[str]:
        """The names of parameters that no file has."""
        return [names[0] for names in self._by_parameter().values() if not any(n in self.stored for n in names)]

    def fill(self, parameters: Sequence[nn.Parameter], *, mapped: bool = False) -> None:
        """Read the values of parameters; those that no file has are drawn, module by module."""
        names = self._by_parameter()
        drawn: set[int] = set()
        for parameter in parameters:
            stored = next((name for name in names[id(parameter)] if name in self.stored), None)
            if stored is None:
                parameter.data = torch.full(parameter.shape, math.nan, dtype=parameter.dtype)
                drawn.add(id(parameter))
            else:
                parameter.data = self.stored.read(stored, parameter, mapped=mapped)
        if drawn:
            self._draw(drawn)

    def _draw(self, drawn: set[int]) -> None:
        """Initialise parameters as transformers does, each module under a seed of its own."""
        from transformers import initialization

        for tensor in (*self._model.parameters(), *self._model.buffers()):
            setattr(tensor, TO_BE_LEFT, id(tensor) not in drawn)
        with PreservedGenerator(torch.device("cpu")) as generator, torch.no_grad():
            for name, owner, module in innermost_first(self._model):
                if any(id(parameter) in drawn for parameter in module.parameters()):
                    generator.seed(derive(self._seed, name))
                    with initialization.guard_torch_init_functions():
                        owner._init_weights(module)
        for names in (names for key, names in self._by_parameter().items() if key in drawn):
            if self._model.get_parameter(names[0]).isnan().any():
                raise UsageError(
                    f"transformers does not say how {names[0]} of {type(self._model).__name__} is initialised, and "
                    "the folder has no value for it: save the model with save_pretrained, and name that folder"
                )

    def _by_parameter(self) -> dict[int, list[str]]:
        if self._names is None:
            self._names = {}
            for name, parameter in self._model.named_parameters(remove_duplicate=False):
                self._names.setdefault(id(parameter), []).append(name)
        return self._names


def innermost_first(model: nn.Module) -> Iterator[tuple[str, Any, nn.Module]]:
    """The modules of a model in the order in which transformers initialises them: name, model that does it, module."""
    from transformers import PreTrainedModel

    def visit(name: str, owner: Any, module: nn.Module) -> Iterator[tuple[str, Any, nn.Module]]:
        for key, child in module.named_children():
            inner = child if isinstance(child, PreTrainedModel) else owner
            yield from visit(f"{name}.{key}" if name else key, inner, child)
        yield name, owner, module

    return visit("", model, model)


def write_surroundings(text: str, model: Any, folder: Path) -> None:
    """Write into a trained model's folder what the folder of hf:FOLDER has beside weights: configuration, tokenizer."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    for path in folder_of(text).iterdir():
        beside = path.suffix in (".json", ".txt", ".model", ".jinja") and path.name not in (CONFIG, INDEX)
        if beside and path.is_file():
            shutil.copyfile(path, folder / path.name)


def digest_of_folder(text: str) -> str:
    """Sixteen characters that differ once the configuration or the weights of hf:FOLDER are others.

    Of a file of weights its length is read, and 64 pieces spread over it.
    """
    folder = folder_of(text)
    digest = sha256((folder / CONFIG).read_bytes())
    for path in sorted({folder / file for file in files_of(folder).values()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(number * max(size - SAMPLE, 0) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]
