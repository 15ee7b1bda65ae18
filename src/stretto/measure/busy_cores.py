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
    if not STAT.exists():
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    begin, before = time.perf_counter(), busy_seconds()
    time.sleep(seconds)
    return (busy_seconds() - before) / (time.perf_counter() - begin)


def busy_seconds(*, interrupts: bool = True) -> float:
    """CPU seconds used on this machine, or by machines that share its cores, up to now (Linux).

    Waiting for files is left out; without `interrupts` also what the kernel spends on messages, whoever they are for.
    """
    line = STAT.read_text(encoding="utf-8").split("\n", 1)[0]  # cpu user nice system idle iowait irq softirq steal ...
    user, nice, system, _, _, irq, softirq, steal = (int(each) for each in line.split()[1:9])
    taken = user + nice + system + steal + (irq + softirq if interrupts else 0)
    return taken / os.sysconf("SC_CLK_TCK")
