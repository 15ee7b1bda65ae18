"""Memory of a training process: what it keeps from step to step, and the most that it or its tensors took."""

import ctypes
import json
import platform
import statistics
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from stretto.nn.devices import HOST
from stretto.nn.stopwatch import recording_operations, silence
from stretto.system.temporary_folders import scratch

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # what glibc's malloc.h calls M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; glibc takes no more
NEVER = 2**31 - 1  # bytes; the most an int holds
PART_END = 65_521  # bytes that mark the end of a part for the profiler; a prime, as hardly a tensor has
CPU = 0  # as torch's profiler numbers devices
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux
FORGET_PEAK = "5"  # written to CLEAR


def keep_memory() -> bool:
    """Tell glibc not to give freed memory back to the system; return whether it will do so.

    Each step frees what the next one needs again: gradients, activations, messages. Left alone, glibc gives the top of
    its heap back, and the kernel clears every page anew: some 5 to 7 % of a step (docs/log.md). A process takes no more
    memory than at its peak. What is larger than 32 MiB is still given back. Another allocator in glibc's place is not
    touched.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and libc.mallopt(TRIM_THRESHOLD, NEVER))


def most_held(device: torch.device) -> int | None:
    """The most bytes that this process has held since it started, or since `forget_most_held`; None if unknown.

    On an accelerator those of tensors there, by torch's allocator; on the CPU the process's resident memory.
    """
    if device.type not in HOST:
        with suppress(RuntimeError):  # torch's allocator for this kind of device does not count
            return int(torch.accelerator.max_memory_allocated(device))
        return None
    with suppress(OSError):  # not Linux
        for line in STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def forget_most_held() -> None:
    """Begin anew what `most_held` tells, on Linux and on accelerators; elsewhere it is since the process started."""
    for index in range(torch.accelerator.device_count()):
        with suppress(RuntimeError):  # as in most_held
            torch.accelerator.reset_peak_memory_stats(index)
    with suppress(OSError):
        CLEAR.write_text(FORGET_PEAK, encoding="ascii")


@dataclass
class Peak:
    """The most bytes that tensors took; known when what was measured is over.

    Each call of `part_ends` begins another part, of like steps: then `bytes` is the larger of the most before the first
    call and the median over parts of the most in each. Memory that another thread frees unseen, as gloo's may, counts
    on until it is used again, which may be some steps later.
    """

    bytes: int = 0

    def part_ends(self) -> None:
        """A part ends here, and another one begins."""
        torch.empty(PART_END, dtype=torch.uint8, device="cpu")


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure the most bytes of tensors that were made inside and lived at one time, by torch's own allocator.

    On the CPU torch tells its profiler of every allocation, of any thread; all are kept until the end, so measure a few
    steps. What libraries allocate behind torch's back (oneDNN's reordered weights) is not seen.
    """
    peak = Peak()
    with silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        recording_operations(on=False)
        try:
            yield peak
        finally:
            recording_operations(on=True)
    with scratch() as folder:
        file = folder / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    told = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == CPU]
    changes = sorted((event["ts"], event["args"]["Addr"], event["args"]["Bytes"]) for event in told)
    first, *parts = most(changes)  # the last one is after the last call
    peak.bytes = max(first, round(statistics.median(parts[:-1]))) if len(parts) > 1 else max(first, *parts, 0)


def most(changes: Sequence[tuple[float, int, int]]) -> list[int]:
    """The most bytes at once in each part, and after the last one.

    `changes` are times, addresses and bytes: of what came, until it goes (bytes below 0), or something else comes into
    its place.
    """
    sizes: dict[int, int] = {}
    addresses: list[int] = []  # of what is there, sorted
    held, peaks = 0, [0]
    for _, address, size in changes:
        if abs(size) == PART_END:
            peaks += [held] if size > 0 else []
            continue
        first = bisect_left(addresses, address)
        if first and addresses[first - 1] + sizes[addresses[first - 1]] > address:
            first -= 1
        last = bisect_left(addresses, address + max(size, 1))
        held += max(size, 0) - sum(sizes.pop(each) for each in addresses[first:last])
        addresses[first:last] = [address] if size > 0 else []
        sizes |= {address: size} if size > 0 else {}
        peaks[-1] = max(peaks[-1], held)
    return peaks
