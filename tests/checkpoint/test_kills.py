"""SIGKILL at any moment loses nothing. `kills.py` says how, and runs longer by itself."""

import json
import os
import sys
from pathlib import Path

import pytest

from runtime.nursery import Forked


@pytest.mark.parametrize(
    ("stride", "kills"), [(7, 3), *(pytest.param(stride, 6, marks=pytest.mark.slow) for stride in (1, 3))]
)
def test_a_killed_writer_loses_nothing(stride, kills):
    script = Path(__file__).with_name("kills.py")
    words = ["--kills", str(kills), "--seed", "7", "--stride", str(stride)]
    process = Forked([sys.executable, str(script), *words], dict(os.environ))
    status = process.wait()
    told, said = process.communicate()
    assert status == 0, said
    result = json.loads(told)
    for name, counts in result.items():
        assert sum(counts.values()) >= kills, name
    for name in ("replaced", "steps"):  # both sides of the rename have been met
        assert min(result[f"{name}, before each operation"].values()) > 0
