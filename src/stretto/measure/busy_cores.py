"""How many cores other programs keep busy."""

import os
import time
from pathlib import Path

MOMENT = 0.5  # seconds
STAT = Path("/proc/stat")


def busy_cores(seconds: float = MOMENT) -> float | None:
    """The cores that programs keep busy over the next `seconds`, in which this thread sleeps.

    Machines that share the cores count, too. Where the system does not tell (other than Linux), the load average of the
    last minute, which what has ended still is a part of; None where there is none.
    """
    begin, before = time.perf_counter(), busy_seconds()
    if before is None:
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    time.sleep(seconds)
    after = busy_seconds()
    assert after is not None, "the file is still there"
    return (after - before) / (time.perf_counter() - begin)


def busy_seconds() -> float | None:
    """CPU seconds that were used on this machine up to now, waiting for files left out; None where nothing tells."""
    if not STAT.exists():
        return None
    line = STAT.read_text(encoding="utf-8").split("\n", 1)[0]  # cpu user nice system idle iowait irq softirq steal ...
    user, nice, system, _, _, irq, softirq, steal = (int(each) for each in line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
