"""The calibrations that `stretto calibrate --collectives` keeps for this user and machine, and which one `auto` uses.

    CACHE/stretto/all-reduce/HOST/8-processes-1-machines.toml      CACHE: `stretto.system.path_names.user_cache`

There is one file for each number of processes and machines; a new calibration replaces the one before.
"""

import math
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

from stretto.collectives.calibration import Calibration
from stretto.errors import UsageError
from stretto.system.destinations import write_whole
from stretto.system.path_names import user_cache

FILE = re.compile(r"(\d+)-processes-(\d+)-machines\.toml")


class Basis(NamedTuple):
    """The calibration that `auto` uses, None for built-in constants; and its file or the reason, in words."""

    calibration: Calibration | None
    words: str

    def to_json(self) -> dict[str, Any]:
        """The basis as JSON takes it, for other processes."""
        return {"calibration": self.calibration and self.calibration.to_dict(), "words": self.words}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Basis":
        """The basis from the result of `to_json`."""
        stored = content["calibration"]
        return cls(None if stored is None else Calibration.of(stored), content["words"])


def host() -> str:
    """The name of this machine, as calibrations keep it."""
    return platform.node() or "this machine"


def folder() -> Path | None:
    """The folder of this machine's calibrations; None for a user without a home."""
    cache = user_cache()
    return None if cache is None else cache / "all-reduce" / re.sub(r"[^\w.-]|^\.+", "_", host())


def keep(calibration: Calibration) -> Path | None:
    """Write a calibration to the file where trainings on this machine find it, and return its path.

    None for a user without a home. Raises OSError if the file cannot be written.
    """
    directory = folder()
    if directory is None:
        return None
    file = directory / f"{calibration.workers}-processes-{calibration.machines}-machines.toml"
    write_whole(file, calibration.to_toml())
    return file


def kept() -> dict[tuple[int, int], Path]:
    """The files of this machine's calibrations, by their numbers of processes and of machines."""
    directory = folder()
    files = sorted(directory.iterdir()) if directory is not None and directory.is_dir() else []
    matches = ((FILE.fullmatch(file.name), file) for file in files)
    return {(int(match[1]), int(match[2])): file for match, file in matches if match and int(match[1])}


def basis(size: int, machines: int = 1, named: str | None = None) -> Basis:
    """The calibration that `auto` uses among `size` processes on `machines` machines.

    That of the file `named`; else the kept one for as many machines with the nearest number of processes. Raises
    UsageError if the file is damaged or no calibration, or if a kept one was measured on another machine.
    """
    if named is not None:
        calibration = Calibration.read(named)
        return Basis(calibration, f"{named}, {measured_among(calibration, size)}")
    files = {processes: file for (processes, num_machines), file in kept().items() if num_machines == machines}
    if not files:
        return Basis(None, f"built-in constants: {missing(size, machines)}")
    file = files[min(files, key=lambda processes: (abs(math.log(processes / size)), -processes))]
    calibration = read_kept(file)
    return Basis(calibration, f"{file}, {measured_among(calibration, size)}")


def read_kept(file: Path) -> Calibration:
    """The calibration in a file of `kept()`. Raises UsageError if it is damaged, or of another machine."""
    try:
        calibration = Calibration.read(file)
    except UsageError as error:
        raise UsageError(f"{error}; or delete it, and built-in constants decide") from error
    if calibration.host not in ("", host()):
        raise UsageError(
            f"{file} was measured on {calibration.host}, and this is {host()}: measure this machine with "
            f"{command(calibration.workers)}, or delete the file; to use it here nevertheless, name it: "
            f"all-reduce(algorithm=auto, calibration={str(file)!r})"
        )
    return calibration


def measured_among(calibration: Calibration, size: int) -> str:
    """In words: among which processes a calibration was measured, and how it serves `size` processes."""
    where = f" on {calibration.host}" if calibration.host else ""
    text = f"measured among {calibration.workers} processes{where}"
    return text if calibration.workers == size else f"{text}; what {size} take follows from its messages and formulas"


def missing(size: int | str = "N", machines: int = 1) -> str:
    """In words: that there is no calibration for so many machines, and the remedy."""
    suffix = "" if machines == 1 else f" among {machines} machines"
    on_all_machines = "stretto calibrate --collectives on all of them, under torchrun or srun"
    remedy = command(size) if machines == 1 else on_all_machines
    return f"no calibration of {host()}{suffix} in {folder() or 'a home folder'}; measure it with {remedy}"


def command(size: int | str) -> str:
    """The command line that measures all-reduces among `size` processes of one machine."""
    return f"stretto calibrate --collectives --workers {size}"
