"""One seed for the user, one derived seed for every place that draws: nothing depends on who else draws, or where."""

from zlib import crc32

_MASK = (1 << 64) - 1


def derive(seed: int, *parts: int | str) -> int:
    """Mix `seed` with a place ("model", stage, micro-batch, ...) into a seed of 63 bits.

    The same place gives the same seed on any number of workers, in any process and on any machine (Python's own
    `hash` would not). The mixing is splitmix64's finalizer; it takes about a microsecond.
    """
    state = seed & _MASK
    for part in parts:
        word = crc32(part.encode()) + 0x51ED2701 if isinstance(part, str) else part
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
