"""Refuses models that need more memory than is free, before anything is allocated."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.errors import UsageError

MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
PER_OBJECT = 2048  # bytes, about, of a module or a tensor beside its elements (CPython 3.11, torch 2.13)


def available() -> float:
    """Bytes of memory that this process may still allocate: the least of the machine's and its control group's."""
    free = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = [line.split() for line in meminfo.read_text(encoding="ascii").splitlines()]
        free += [1024.0 * int(words[1]) for words in lines if words[0] == "MemAvailable:"]
    group = Path("/sys/fs/cgroup")
    limit, usage = group / "memory.max", group / "memory.current"
    if limit.is_file() and usage.is_file() and (most := limit.read_text(encoding="ascii").strip()).isdecimal():
        free.append(float(most) - float(usage.read_text(encoding="ascii")))
    return min(free)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size_of(modules: Iterable[nn.Module | None]) -> float:
    """Bytes of modules: parameters, buffers, and the Python objects that hold them."""
    size = 0.0
    for module in modules:
        if module is not None:
            tensors = [*module.parameters(), *module.buffers()]
            size += bytes_of(tensors)
            size += PER_OBJECT * (len(tensors) + sum(1 for _ in module.modules()))
    return size


def refuse_more(needed: float, what: str, remedy: str) -> None:
    """Raise UsageError if `needed` bytes are more than are free; `what` needs them."""
    free = available()
    if needed > free:
        raise UsageError(f"{what}: {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free here; {remedy}")


class Allowance(TorchFunctionMode):
    """In this block torch's factory functions may allocate as many bytes as were free at its start.

    A call beyond that raises UsageError before it allocates; `what` is the model being built, for the message.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._free, self._allocated = what, available(), 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the bytes of a tensor made from a shape. Raises UsageError if the total exceeds the free memory."""
        options = dict(kwargs or {})
        if func in MAKERS:
            first = options.get("size", args[0] if args else ())
            shape = first if isinstance(first, Sequence) else [arg for arg in args if isinstance(arg, int)]
            dtype = options.get("dtype") or torch.get_default_dtype()
            self._allocated += math.prod(shape) * dtype.itemsize
            if self._allocated > self._free:
                raise UsageError(
                    f"{self._what} has weights of more than {self._allocated / 2**30:,.1f} GiB, and "
                    f"{self._free / 2**30:,.1f} GiB are free here; choose smaller numbers"
                )
        return func(*args, **options)
