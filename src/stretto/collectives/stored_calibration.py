"""The calibrations that `stretto calibrate --collectives` keeps for this user and machine, and what `auto` goes by.

    CACHE/stretto/all-reduce/HOST/8-processes-1-machines.toml      CACHE: `stretto.files.user_folders.user_cache`

One file for each number of processes and of machines that they are on; the newest calibration replaces the one before.
"""

import math
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

from stretto.collectives.calibration import Calibration
from stretto.errors import UsageError
from stretto.files.user_folders import user_cache
from stretto.files.whole_files import write_whole

FILE = re.compile(r"(\d+)-processes-(\d+)-machines\.toml")


class Basis(NamedTuple):
    """What `auto` goes by: a calibration, None for built-in constants; and which one or why, in words."""

    calibration: Calibration | None
    words: str

    def to_json(self) -> dict[str, Any]:
        """The basis as JSON takes it, for other processes."""
        return {"calibration": self.calibration and self.calibration.to_dict(), "words": self.words}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> "Basis":
        """From what `to_json` gave."""
        stored = content["calibration"]
        return cls(None if stored is None else Calibration.of(stored), content["words"])


def host() -> str:
    """The name of this machine, as calibrations keep it."""
    return platform.node() or "this machine"


def folder() -> Path | None:
    """Where this machine's calibrations are; None for a user without a home."""
    cache = user_cache()
    return None if cache is None else cache / "all-reduce" / re.sub(r"[^\w.-]|^\.+", "_", host())


def keep(calibration: Calibration) -> Path | None:
    """Write a calibration where trainings on this machine find it; None for a user without a home. Raises OSError."""
    home = folder()
    if home is None:
        return None
    file = home / f"{calibration.workers}-processes-{calibration.machines}-machines.toml"
    write_whole(file, calibration.to_toml())
    return file


def kept() -> dict[tuple[int, int], Path]:
    """The files of this machine, by the numbers of processes and of machines that they are about."""
    home = folder()
    files = sorted(home.iterdir()) if home is not None and home.is_dir() else []
    named = ((FILE.fullmatch(file.name), file) for file in files)
    return {(int(match[1]), int(match[2])): file for match, file in named if match and int(match[1])}


def basis(size: int, machines: int = 1, named: str | None = None) -> Basis:
    """What `auto` goes by among `size` processes: the file that is `named`, else of those kept the nearest in size.

    Raises UsageError if that file is damaged, is something else, or, kept, was measured on another machine.
    """
    if named is not None:
        calibration = Calibration.read(named)
        return Basis(calibration, f"{named}, {measured_among(calibration, size)}")
    files = {processes: file for (processes, spread), file in kept().items() if spread == machines}
    if not files:
        return Basis(None, f"built-in constants: {missing(size, machines)}")
    file = files[min(files, key=lambda processes: (abs(math.log(processes / size)), -processes))]
    calibration = read_kept(file)
    return Basis(calibration, f"{file}, {measured_among(calibration, size)}")


def read_kept(file: Path) -> Calibration:
    """A calibration that this machine has kept. Raises UsageError if it is damaged, or another machine's."""
    try:
        calibration = Calibration.read(file)
    except UsageError as error:
        raise UsageError(f"{error}; or delete it, and built-in constants decide") from error
    if calibration.host not in ("", host()):
        raise UsageError(
            f"{file} was measured on {calibration.host}, and this is {host()}: measure this machine with "
            f"{command(calibration.workers)}, or delete the file; to go by it all the same, name it: "
            f"all-reduce(algorithm=auto, calibration={str(file)!r})"
        )
    return calibration


def measured_among(calibration: Calibration, size: int) -> str:
    """Which processes a calibration is about, beside those that are to use it."""
    where = f" on {calibration.host}" if calibration.host else ""
    text = f"measured among {calibration.workers} processes{where}"
    return text if calibration.workers == size else f"{text}; what {size} take follows from its messages and formulas"


def missing(size: int | str = "N", machines: int = 1) -> str:
    """That nothing has been measured, and the remedy."""
    about = "" if machines == 1 else f" among {machines} machines"
    together = "stretto calibrate --collectives on all of them, under torchrun or srun"
    remedy = command(size) if machines == 1 else together
    return f"no calibration of {host()}{about} in {folder() or 'a home folder'}; measure it with {remedy}"


def command(size: int | str) -> str:
    """The command that measures so many processes."""
    return f"stretto calibrate --collectives --workers {size}"
