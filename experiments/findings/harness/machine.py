"""Where a run was made: versions, processor, load."""

import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from stretto.study.store import versions as of_packages

HERE = Path(__file__).parent
QUIET = 0.3  # of load, beyond the runs under way


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and packages, and the commit of the repository when the process first asks."""
    return {**of_packages(), "commit": _git("rev-parse", "--short=10", "HEAD")}


def machine() -> dict[str, Any]:
    """The processor, the number of cores that this process may use, and the threads that torch takes."""
    return {"processor": _processor(), "cores": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}


def load() -> float:
    """How many processes have been running or waiting for a core, over the last minute."""
    return round(os.getloadavg()[0], 2)


def _git(*words: str) -> str:
    try:
        told = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # a copy without its history
    return told.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {names[0]}" if names else platform.machine()
