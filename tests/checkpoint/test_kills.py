"""SIGKILL at any moment loses nothing. `kills.py` says how, and runs longer by itself."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_killed_writer_loses_nothing():
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run([sys.executable, script, "--kills", "6", "--seed", "7"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for name, counts in result.items():
        assert sum(counts.values()) >= 6, name
    for name in ("replaced", "steps"):  # both sides of the rename have been met
        assert min(result[f"{name}, before each operation"].values()) > 0
