"""A process that keeps its memory does not fault the same pages in again; the most that tensors took."""

import os
import platform
import subprocess
import sys

import pytest

from runtime.nursery import Forked

SCRIPT = """
import resource
import torch
from stretto.runtime.process_memory import keep_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():  # a gradient's memory, freed at the top of the heap
    return [torch.empty(2**20).fill_(1.0) for _ in range(4)]

assert keep_memory()
for _ in range(3):
    step()
before = faults()
for _ in range(20):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_freed_memory_is_used_again() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 20 * 100, "of 20 times 4096 pages"


MEASURED = """
import torch
from stretto.runtime.process_memory import peak_memory

there = torch.zeros(1000)  # made before: not counted
with peak_memory() as peak:
    a = torch.zeros(1000)
    b = torch.zeros(3000)
    del a
    c = torch.zeros(500)
    del b, c
    d = torch.zeros(2000)
print(peak.bytes)
"""


def test_the_most_that_tensors_took_at_once() -> None:
    process = Forked([sys.executable, "-c", MEASURED], dict(os.environ))
    status = process.wait()
    out, err = process.communicate()
    assert status == 0, err
    assert int(out) == 4 * 4000


IN_PARTS = """
import torch
from stretto.runtime.process_memory import peak_memory

with peak_memory() as peak:
    weights = torch.zeros(1000)
    peak.part_ends()
    for size in (2000, 2000, 5000, 2000):
        step = torch.zeros(size)
        del step
        peak.part_ends()
    end = torch.zeros(9000)
print(peak.bytes)
"""


def test_of_parts_that_are_alike_the_median_counts() -> None:
    process = Forked([sys.executable, "-c", IN_PARTS], dict(os.environ))
    out, err = process.communicate()
    assert process.wait() == 0, err
    assert int(out) == 4 * 3000
