"""What a trainer saved, by the names of a model's parameters, and batches: from dicts, modules, functions and files."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.analysis.diagnosis.evidence import Entry
from stretto.analysis.diagnosis.step import TrainingStep
from stretto.errors import UsageError, nearest
from stretto.models.hugging_face import INDEX, indexed
from stretto.options.checks import shown
from stretto.options.import_object import call, is_function

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "model", "stages", "stage")
"""What data parallelism, compilation, sharding and pipelines put before or into names."""
TARGETS = ("target", "targets", "labels", "y")
INPUTS = ("input", "inputs", "x")
FORMS = "safetensors, torch.save, a folder of torch.distributed.checkpoint, or one with Hugging Face's index"


def tensors_by_name(given: Any, what: str) -> dict[str, Tensor | None]:
    """The tensors in a dict, in a module (their gradients, if `what` is gradients), or in a file.

    Raises UsageError for anything else.
    """
    if isinstance(given, str | Path):
        return dict(read(Path(given)))
    if isinstance(given, nn.Module):
        named = given.named_parameters(remove_duplicate=False)
        return {name: p.grad if what == "gradients" else p.detach() for name, p in named}
    if not isinstance(given, Mapping):
        raise UsageError(f"diagnose: {what} is {shown(given)}: give a dict of tensors, a module, or a file")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor | None):
            raise UsageError(f"diagnose: {what}[{name!r}] is {shown(value)}: give tensors, by the names of parameters")
    return dict(given)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors in a file or a folder. Raises UsageError where there are none; nothing in it is executed."""
    if not path.exists():
        raise UsageError(f"there is no {path}: give a file or a folder of tensors ({FORMS})")
    if path.is_dir():
        return read_folder(path)
    if path.suffix == ".json":
        return read_index(path)
    found = unpacked(path)
    tensors = flat(found) if isinstance(found, Mapping) else {}
    if not tensors:
        raise UsageError(f"{path} holds {type(found).__name__}: save a dict of tensors, by the names of parameters")
    return tensors


def unpacked(path: Path) -> Any:
    """What a file of safetensors or of torch.save holds. Raises UsageError for others, and for more than tensors."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors ({str(error).splitlines()[0]}): save a dict of tensors"
        ) from error
    except Exception as error:
        raise UsageError(f"{path} cannot be read ({type(error).__name__}: {error}): give {FORMS}") from error


def flat(found: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors in nested dicts, their keys joined by dots."""
    tensors: dict[str, Tensor] = {}
    for key, value in found.items():
        if isinstance(value, Tensor):
            tensors[str(key)] = value
        elif isinstance(value, Mapping):
            tensors |= {f"{key}.{name}": tensor for name, tensor in flat(value).items()}
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / ".metadata").is_file():
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        from stretto.checkpoint.tensors import Reader, load_tensors

        metadata = Reader(folder).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load_tensors(folder, tensors)
        return tensors
    if (folder / INDEX).is_file():
        return read_index(folder / INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{folder} holds no tensors that are known here: give {FORMS}")
    return {name: tensor for file in files for name, tensor in read(file).items()}


def read_index(index: Path) -> dict[str, Tensor]:
    """The tensors of a model in several files of safetensors."""
    files = sorted(set(indexed(index).values()))
    return {name: tensor for file in files for name, tensor in read(index.parent / file).items()}


def stripped(name: str) -> str:
    """A name without what wrappers add: `module.`, `_orig_mod.`, `stages.3.`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def matched(
    names: Sequence[str], known: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, str]:
    """The parameter of each given name: the same; the same without wrappers; the only one that ends alike."""
    found = {name: name for name in names if name in known}
    short = {stripped(name): name for name in known}
    for name in names:
        if name in found:
            continue
        parts = stripped(name).split(".")
        for first in range(max(1, len(parts) - 1)):  # more than "weight" alone
            end = ".".join(parts[first:])
            if end in short:
                found[name] = short[end]
                break
            alike = [full for key, full in short.items() if key.endswith("." + end) and known[full] == shapes[name]]
            if len(alike) == 1:
                found[name] = alike[0]
                break
    return found


def by_parameter(model: nn.Module, given: Any, what: str) -> dict[str, Tensor]:
    """Weights by the names of the model's parameters. Raises UsageError for names or shapes that do not fit."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    tensors = {name: value for name, value in tensors_by_name(given, what).items() if value is not None}
    known = {name: tuple(p.shape) for name, p in parameters.items()}
    names = matched(list(tensors), known, {name: tuple(value.shape) for name, value in tensors.items()})
    found = {first[id(parameters[names[name]])]: tensors[name] for name in names}
    for name, value in found.items():
        if value.shape != parameters[name].shape:
            raise UsageError(
                f"diagnose: {what} has {list(value.shape)} for {name}, which is {list(parameters[name].shape)}"
            )
    if not found:
        raise UsageError(f"diagnose: no name in {what} is a parameter's: {next(iter(tensors), 'it is empty')!r}, ...")
    return {name: value.to(parameters[name].dtype) for name, value in found.items()}


def by_module(model: nn.Module, given: Any) -> dict[str, Tensor]:
    """Outputs by the names of the model's modules. Raises UsageError for names that are no module's."""
    tensors = {name: value for name, value in tensors_by_name(given, "activations").items() if value is not None}
    known = dict.fromkeys((name for name, _ in model.named_modules()), ())
    names = matched(list(tensors), known, dict.fromkeys(tensors, ()))
    for name in tensors:
        if name not in names:
            raise UsageError(f"diagnose: activations has {name!r}, which is no module: {nearest(name, known)}")
    return {names[name]: value for name, value in tensors.items()}


def entries_of(
    step: TrainingStep, given: Mapping[str, Tensor | None]
) -> tuple[dict[Entry, Tensor | None], dict[str, str]]:
    """Given gradients by entry, in the order of the model, and the parameter of each given name that is another.

    A parameter without one has None. Raises UsageError for names that are no parameter's, and for other shapes.
    """
    trained = {name: first for name, first in step.aliases.items() if first in step.parameters}
    shapes = {name: tuple(step.parameters[first].shape) for name, first in trained.items()}
    names = matched(list(given), shapes, {name: tuple(v.shape) if v is not None else () for name, v in given.items()})
    frozen = set(step.aliases) - set(trained)
    unknown = [name for name in given if name not in names and name not in frozen and stripped(name) not in frozen]
    if unknown:
        raise UsageError(
            f"diagnose: gradients has {unknown[0]!r}, which is no parameter of the model "
            f"({len(unknown)} of {len(given)} names are none): {nearest(unknown[0], list(trained))}"
        )
    by_name: dict[str, Tensor | None] = {}
    for name, value in given.items():
        target = names.get(name)
        if target is None:
            continue
        if value is not None and tuple(value.shape) != shapes[target]:
            raise UsageError(
                f"diagnose: the gradient {name!r} is {list(value.shape)}, and {target} {list(shapes[target])}"
            )
        by_name[target] = value
    entries: dict[Entry, Tensor | None] = {}
    for first in step.parameters:
        own = [name for name in trained if trained[name] == first and by_name.get(name) is not None]
        for name in own or [first]:
            entries[Entry(name, first)] = by_name.get(name)
    return entries, {name: target for name, target in names.items() if name != target}


def read_batch(text: str) -> tuple[Any, Any]:
    """(inputs, targets). A dict's target is its entry `targets` or `labels`. Raises UsageError for anything else."""
    if is_function(text):
        return pair(call(text, "batch", {}), text)
    return pair(read(Path(text)), text)


def pair(batch: Any, where: str) -> tuple[Any, Any]:
    """Inputs and targets of a batch, as functions and files have it."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"{where} gave {shown(batch)}: give (inputs, targets), or a dict with targets among its entries"
        )
    names = [name for name in TARGETS if name in batch]
    if not names:
        raise UsageError(
            f"{where} has {', '.join(map(str, batch))}, and no target: call one of them targets, or labels"
        )
    inputs: dict[str, Tensor] = {name: value for name, value in batch.items() if name != names[0]}
    alone = next(iter(inputs.values())) if len(inputs) == 1 and next(iter(inputs)) in INPUTS else None
    return (inputs if alone is None else alone), batch[names[0]]
