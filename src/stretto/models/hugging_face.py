"""Models of Hugging Face's from a folder: config.json, and weights from safetensors where they are there.

No weight takes memory before the process that holds its stage reads it, or draws it.
"""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.models.stored_weights import INDEX, StoredWeights, files_of
from stretto.nn.deferred import defer
from stretto.nn.seeding import PreservedGenerator, derive
from stretto.options.import_object import FOLDER

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

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Read the values of parameters; those that no file has are drawn, module by module."""
        names = self._by_parameter()
        drawn: set[int] = set()
        for parameter in parameters:
            stored = next((name for name in names[id(parameter)] if name in self.stored), None)
            if stored is None:
                parameter.data = torch.full(parameter.shape, math.nan, dtype=parameter.dtype)
                drawn.add(id(parameter))
            else:
                parameter.data = self.stored.read(stored, parameter)
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
