"""Memory that a training process keeps from step to step."""

import ctypes
import platform

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # what glibc's malloc.h calls M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes; glibc takes no more
NEVER = 2**31 - 1  # bytes; the most an int holds


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
