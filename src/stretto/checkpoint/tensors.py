"""Tensors by name in a folder, as torch.distributed.checkpoint writes them. Importing this takes a second.

torch's reader unpickles any object that `.metadata` names; this one refuses all but the classes of such a file.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stretto.system.path_names import in_path

METADATA = "torch.distributed.checkpoint.metadata"
CONSISTS_OF = {
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorStorageMetadata"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "TensorProperties"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # CPython 3.13
}


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to `folder` and fsync the files, without messages to other workers."""
    with _torch_errors():
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read into `tensors`, which have the shapes and dtypes of the saved tensors of the same names."""
    with _torch_errors():
        Reader(folder).read_metadata()  # torch's loader would catch and print its errors, and read again
        load(dict(tensors), storage_reader=Reader(folder), no_dist=True)


def names_in(folder: Path) -> set[str]:
    """The names of the tensors in `folder`."""
    with _torch_errors():
        return set(Reader(folder).read_metadata().state_dict_metadata)


class Reader(FileSystemReader):
    """torch's reader, which reads tensors with weights_only; this one also unpickles only known classes of metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The content of `.metadata`. Raises pickle.UnpicklingError if it names a class that metadata does not have."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        for storage in (metadata.storage_data or {}).values():
            in_path(storage.relative_path, f"{self.path}: the name of a file with tensors")
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in CONSISTS_OF:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")
        return super().find_class(module.removesuffix("._local"), name)  # only CPython 3.13 has pathlib._local


@contextmanager
def _torch_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist disables it on purpose
        try:
            yield
        except CheckpointException as error:  # a BaseException, in which torch wraps all others
            raise _cause(error) from None


def _cause(error: CheckpointException) -> BaseException:
    # After a failed write torch raises a RuntimeError about the archive's length; the OSError is its cause.
    first: BaseException
    first, _ = next(iter(error.failures.values()))
    cause: BaseException | None = first
    while cause is not None:
        if isinstance(cause, OSError) or not isinstance(cause, Exception):
            return cause
        cause = cause.__cause__ or cause.__context__
    return first
