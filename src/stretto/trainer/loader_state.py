"""The state of a data loader as a checkpoint's manifest holds it: tensors and arrays as bytes."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

TENSOR, ARRAY = "stretto tensor", "stretto array"


def samplers_of(loader: Any) -> list[Any]:
    """What decides the order of a DataLoader's examples."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    given = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return [sampler for sampler in given if sampler is not None]


def follows_generators(loader: Any) -> bool:
    """Whether it is a DataLoader that gives the same batches again from the same states of all generators.

    Samplers of one's own, iterable datasets and workers that stay may remember more.
    """
    known = ("torch.utils.data.sampler", "builtins")
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and not loader.persistent_workers
        and all(type(sampler).__module__ in known for sampler in samplers_of(loader))
    )


def generator_states(loader: Any) -> dict[str, Any]:
    """The states of all generators that a DataLoader's batches may draw from: the global ones and its own."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "own": [generator.get_state() for generator in generators_of(loader)],
    }


def set_generators(loader: Any, states: Mapping[str, Any]) -> None:
    """Set the generators to what `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for generator, state in zip(generators_of(loader), states["own"], strict=False):
        generator.set_state(state)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that were given to a DataLoader and its samplers."""
    given = [getattr(part, "generator", None) for part in (loader, *samplers_of(loader))]
    return [generator for generator in given if isinstance(generator, torch.Generator)]


def packed(state: Any) -> Any:
    """Replace tensors and arrays by (tag, type, shape, bytes), in dicts, lists and tuples."""
    if isinstance(state, Tensor):
        array = state.detach().cpu().contiguous()
        content = array.flatten().view(torch.uint8).numpy().tobytes()
        return (TENSOR, str(array.dtype).removeprefix("torch."), list(array.shape), content)
    if isinstance(state, np.ndarray | np.generic):
        return (ARRAY, str(state.dtype), list(state.shape), state.tobytes())
    if isinstance(state, Mapping):
        return {key: packed(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([packed(value) for value in state])
    return state


def unpacked(state: Any) -> Any:
    """The state that `packed` was given; numbers of NumPy come back as arrays without dimensions."""
    if isinstance(state, tuple) and len(state) == 4 and state[0] in (TENSOR, ARRAY):
        kind, dtype, shape, content = state
        if kind == ARRAY:
            return np.frombuffer(content, dtype=dtype).reshape(shape).copy()
        flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)) if content else torch.empty(0)
        return flat.to(getattr(torch, dtype)).reshape(shape)
    if isinstance(state, dict):
        return {key: unpacked(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)([unpacked(value) for value in state])
    return state
