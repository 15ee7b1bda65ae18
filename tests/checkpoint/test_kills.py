"""SIGKILL at any moment loses nothing. `kills.py` says how, and runs longer by itself."""

import json
import os
import sys
from pathlib import Path

import pytest

from runtime.nursery import Forked


@pytest.mark.parametrize("stride", [pytest.param("1", marks=pytest.mark.slow), "3"])
def test_a_killed_writer_loses_nothing(stride):
    script = Path(__file__).with_name("kills.py")
    words = ["--kills", "6", "--seed", "7", "--stride", stride]
    process = Forked([sys.executable, str(script), *words], dict(os.environ))
    status = process.wait()
    told, said = process.communicate()
    assert status == 0, said
    result = json.loads(told)
    for name, counts in result.items():
        assert sum(counts.values()) >= 6, name
    for name in ("replaced", "steps"):  # both sides of the rename have been met
        assert min(result[f"{name}, before each operation"].values()) > 0
