"""How much memory there is, and what is refused because it needs more: before anything is allocated."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stretto.errors import UsageError

MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)
PER_OBJECT = 2048  # bytes, about, of a module or a tensor besides its numbers (CPython 3.11, torch 2.13)


def available() -> float:
    """Bytes that this process may still take: of the machine, and of its control group if that has a limit."""
    free = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    told = Path("/proc/meminfo")
    if told.is_file():
        lines = [line.split() for line in told.read_text(encoding="ascii").splitlines()]
        free += [1024.0 * int(words[1]) for words in lines if words[0] == "MemAvailable:"]
    group = Path("/sys/fs/cgroup")
    limit, taken = group / "memory.max", group / "memory.current"
    if limit.is_file() and taken.is_file() and (most := limit.read_text(encoding="ascii").strip()).isdecimal():
        free.append(float(most) - float(taken.read_text(encoding="ascii")))
    return min(free)


def size_of(modules: Iterable[nn.Module | None]) -> float:
    """Bytes of modules: parameters, buffers, and Python's share."""
    size = 0.0
    for module in modules:
        if module is not None:
            tensors = [*module.parameters(), *module.buffers()]
            size += sum(each.numel() * each.element_size() for each in tensors)
            size += PER_OBJECT * (len(tensors) + sum(1 for _ in module.modules()))
    return size


def refuse_more(needed: float, what: str, remedy: str) -> None:
    """Raise UsageError if so many bytes are not there."""
    there = available()
    if needed > there:
        raise UsageError(f"{what}: {needed / 2**30:,.1f} GiB, and {there / 2**30:,.1f} GiB are free here; {remedy}")


class Allowance(TorchFunctionMode):
    """While it lasts, tensors may be made for as many bytes as are there now; more are refused before they are made.

    `what` is being built; UsageError says that it is too large.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._there, self._made = what, available(), 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count what is made of a shape, and refuse it if it is too much."""
        options = dict(kwargs or {})
        if func in MAKERS:
            first = options.get("size", args[0] if args else ())
            shape = first if isinstance(first, Sequence) else [each for each in args if isinstance(each, int)]
            dtype = options.get("dtype") or torch.get_default_dtype()
            self._made += math.prod(shape) * dtype.itemsize
            if self._made > self._there:
                raise UsageError(
                    f"{self._what} has weights of more than {self._made / 2**30:,.1f} GiB, and "
                    f"{self._there / 2**30:,.1f} GiB are free here; choose smaller numbers"
                )
        return func(*args, **options)
