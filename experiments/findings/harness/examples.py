"""MNIST as studies train it, made-up examples for what is timed, and networks in equal stages."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stretto
from stretto.data import Dataset, Split, load
from stretto.models.model import Recipe

TRAINED, CHOOSING = 10_000, 2_000  # training images that are used, and validation images that choose rates


def folder_of(path: str | None, name: str) -> dict[str, str]:
    """The option `path` of a data set: the folder itself, or the one of this name in it; none for its default."""
    if path is None:
        return {}
    inside = Path(path) / name
    return {"path": str(inside if inside.is_dir() else path)}


@functools.cache
def mnist(path: str | None, tested: int, choosing: int = CHOOSING) -> Dataset:
    """MNIST with its first training images alone, so many test images, and so many that choose rates."""
    data = load("mnist", **folder_of(path, "mnist"))

    def first(split: Any, count: int) -> Split:
        return Split(*(part.clone() for part in split.first(count)))  # so that the others are freed

    return replace(
        data, train=first(data.train, TRAINED), validation=first(data.validation, choosing),
        test=first(data.test, tested),
    )  # fmt: skip


@functools.cache
def text(path: str | None, context: int) -> Dataset:
    """The bytes of the text in the folder, in windows of `context`."""
    return load("text", context=context, **folder_of(path, "text"))


def made_up(shape: tuple[int, ...], classes: int, *, tokens: bool = False, examples: int = 8) -> Dataset:
    """A few random examples of a data set's shape, for networks that are timed."""
    generator = torch.Generator().manual_seed(0)
    if tokens:
        x = torch.randint(classes, (examples, *shape), generator=generator)
        split, task = Split(x, x), "language"
    else:
        x = torch.randn((examples, *shape), generator=generator)
        split, task = Split(x, torch.randint(classes, (examples,), generator=generator)), "classification"
    return Dataset(
        name="made-up", task=task, num_classes=classes, train=split, validation=split, test=split,
        description="random numbers", options={},
    )  # fmt: skip


def stages_of(recipe: Recipe, count: int, seed: int) -> list[nn.Module]:
    """A recipe's blocks in `count` stages of equally many; the weights depend on the seed alone."""
    if len(recipe) % count:
        raise ValueError(f"{len(recipe)} blocks do not make {count} equal stages")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [make() for make in recipe]
    return stretto.split(blocks, range(0, len(blocks) + 1, len(blocks) // count))
