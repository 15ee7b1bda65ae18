"""An object is another one once anything that it sees is: closures, defaults, globals, the object of a method."""

import functools
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from stretto.options.object_digest import object_digest

WIDTH = 4
ROOT = Path(__file__).parents[2]


def closure(width):
    return lambda: nn.Linear(8, width)


def default(width):
    def build(size=width):
        return nn.Linear(8, size)

    return build


def keyword(width):
    def build(*, size=width):
        return nn.Linear(8, size)

    return build


def deeper(width):
    inner = closure(width)
    return lambda: inner()


def through_a_list(width):
    sizes = [{"width": width}]
    return lambda: sizes


class Maker:
    """Builds with a width of its own."""

    def __init__(self, width):
        self.width = width

    def build(self):
        return nn.Linear(8, self.width)

    def __call__(self):
        return self.build()


def wrapped(width):
    @functools.wraps(closure)
    def build():
        return width

    return build


def of_tensors(width):
    held = torch.full((3,), float(width)), np.full(3, width), nn.Linear(2, 2)
    with torch.no_grad():
        held[2].weight.fill_(width)
        held[2].bias.fill_(0)
    return lambda: held


WAYS = {
    "closure": closure, "default": default, "keyword": keyword, "deeper": deeper, "list": through_a_list,
    "method": lambda width: Maker(width).build, "object": Maker,
    "partial": lambda width: functools.partial(closure, width),
    "wrapped": wrapped, "tensors": of_tensors, "module": lambda width: of_tensors(width)()[2],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_it_sees_makes_it_another_one(way):
    make = WAYS[way]
    assert object_digest(make(2)) == object_digest(make(2))
    assert object_digest(make(2)) != object_digest(make(3))


def reads_a_global():
    return helper()


def helper():
    return WIDTH


def test_a_global_that_a_function_it_calls_reads(monkeypatch):
    before = object_digest(reads_a_global)
    assert object_digest(reads_a_global) == before
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 5)
    assert object_digest(reads_a_global) != before


def test_what_cannot_be_told_is_another_one_each_time():
    with Path(__file__).open() as file:
        assert object_digest(lambda: file) != object_digest(lambda: file)


def test_circles_and_equal_parts_of_other_places_are_followed():
    circle = [1]
    circle.append(circle)
    same = [1]
    same.append(same)
    assert object_digest(circle) == object_digest(same)
    shared = [3]
    assert object_digest([shared, shared]) != object_digest([shared, [4]])


def test_it_is_the_same_in_every_process():
    """Whatever the seed of hashes."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from options.test_object_digest import WAYS, object_digest, reads_a_global\n"
        "print([object_digest(WAYS[way](2)) for way in WAYS], [*map(object_digest, ({'a', 'b', 'c'}, reads_a_global))])"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "tests")], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    ).stdout  # fmt: skip
    here = [object_digest(WAYS[way](2)) for way in WAYS], [*map(object_digest, ({"a", "b", "c"}, reads_a_global))]
    assert told == " ".join(map(str, here)) + "\n"


def test_random_state_of_a_module_is_not_looked_into():
    """A function that reads `random` is the same whatever was drawn."""
    build = lambda: random.random()  # noqa: E731
    before = object_digest(build)
    random.random()
    assert object_digest(build) == before
