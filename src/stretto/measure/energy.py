"""The energy that processors use, where they count it: RAPL of CPUs (Linux), NVML of NVIDIA's GPUs.

RAPL counts what a whole CPU uses, of all programs. Linux lets root alone read it unless an administrator allows more.
"""

import importlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from stretto.nn.devices import HOST, uuid_of

POWERCAP = Path("/sys/class/powercap")
PERIOD = 5.0  # seconds between two readings, at most while steps are made: RAPL's counters wrap within minutes


class Counter(Protocol):
    """Counts the energy of one device."""

    @property
    def name(self) -> str:
        """The interface, and the name that it gives the device."""

    def joules(self) -> float:
        """Joules since some time in the past. Raises OSError if it cannot be read."""


class RaplDomain:
    """The counter of a CPU package, or of its memory, from a folder of Linux' powercap. Raises OSError, ValueError."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())  # microjoules; then it begins again at 0
        self.name = f"RAPL {(folder / 'name').read_text().strip()}"
        self._last, self._total = self._read(), 0

    def joules(self) -> float:
        """Joules since this object was made, if it was read at least once each time round."""
        now = self._read()
        self._total += now - self._last + (self._range if now < self._last else 0)
        self._last = now
        return self._total / 1e6

    def _read(self) -> int:
        return int(self._file.read_text())


def rapl_domains(root: Path = POWERCAP) -> list[RaplDomain]:
    """Every CPU package of this machine, and its memory where that is counted apart.

    Empty where there is none, or where one of them cannot be read: a part of the energy would pass for all of it.
    Cores are parts of packages; "psys", the whole board, would count packages twice.
    """
    try:
        folders = sorted(folder for folder in root.glob("intel-rapl:*") if is_counted(folder))
        return [RaplDomain(folder) for folder in folders]
    except (OSError, ValueError):
        return []


def is_counted(folder: Path) -> bool:
    """Whether a folder of powercap is a CPU package, or the memory of one."""
    name = (folder / "name").read_text().strip()
    return name.startswith("package") or name == "dram"


class NvmlDevice:
    """The counter of an NVIDIA GPU. Raises OSError if it has none (before the Volta generation)."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self.name = f"NVML {nvml.nvmlDeviceGetName(self._handle)}"
        except nvml.NVMLError as error:
            raise OSError(f"{error}") from error
        self.joules()

    def joules(self) -> float:
        """Joules since the driver was loaded."""
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            raise OSError(f"{error}") from error


def nvml_devices(uuids: Sequence[str]) -> list[NvmlDevice]:
    """These GPUs; empty without the package pynvml, or where one of them cannot be read."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return [NvmlDevice(nvml, uuid) for uuid in uuids]
    except (ImportError, OSError):
        return []
    except Exception as error:
        if type(error).__name__.startswith("NVMLError"):  # of a driver that is not there
            return []
        raise


class EnergyMeter:
    """The energy of some counters between `start` and `pause`. A counter that fails ends the measurement for good."""

    def __init__(self, counters: Sequence[Counter]) -> None:
        self._counters = counters
        self._joules: float | None = 0.0
        self._last: float | None = None  # what the counters said; None while it is paused
        self._read_at = 0.0

    @property
    def source(self) -> str:
        """The names of the counters."""
        return ", ".join(counter.name for counter in self._counters)

    @property
    def joules(self) -> float | None:
        """Joules up to the last reading; None after a counter has failed."""
        return self._joules

    def start(self) -> None:
        """Count from now on."""
        self._last = self._read()

    def pause(self) -> None:
        """Count what was used up to now, and no more until `start`."""
        now = self._read()
        if self._joules is not None and self._last is not None and now is not None:
            self._joules += now - self._last
        self._last = None

    def tick(self) -> None:
        """Read the counters if the last reading was PERIOD seconds ago; to be called at every step."""
        if time.monotonic() >= self._read_at + PERIOD:
            self.pause()
            self.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within this context."""
        self.pause()
        try:
            yield
        finally:
            self.start()

    def _read(self) -> float | None:
        self._read_at = time.monotonic()
        try:
            return sum(counter.joules() for counter in self._counters)
        except (OSError, ValueError):
            self._joules = None
            return None


def energy_meter(devices: Iterable[torch.device], *, root: Path = POWERCAP) -> EnergyMeter | None:
    """A meter of the machine's CPUs, and of those of the `devices` that are accelerators; None if one has no counter.

    None, too, if nothing can be measured.
    """
    accelerators = [device for device in devices if device.type not in HOST]
    uuids = [uuid for device in accelerators if (uuid := uuid_of(device)) is not None]
    gpus = nvml_devices(uuids) if uuids else []
    counters: list[Counter] = [*rapl_domains(root), *gpus]
    return EnergyMeter(counters) if counters and len(gpus) == len(accelerators) else None
