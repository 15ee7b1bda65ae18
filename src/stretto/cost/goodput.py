"""Goodput: the share of time that is useful work where workers fail and training goes on from the last checkpoint.

The complete model of Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22. A job fails at random, at a constant rate, on average once in `mtbf` seconds. It
writes a checkpoint of `checkpoint` seconds after each `interval` seconds of work. A failure stops all workers, replicas
included, and loses what was done since the last whole checkpoint; after `restart` seconds the job goes on, on as many
workers. It may fail while it writes a checkpoint, and while it restarts, too. The work of an interval then takes on
average

    mtbf exp(restart / mtbf) (exp((interval + checkpoint) / mtbf) - 1)

seconds. The interval of the highest goodput, x mtbf, is where exp(x + checkpoint / mtbf) (1 - x) = 1.
"""

import math

MOST = 700.0  # exponents: beyond, floats overflow, and goodput is nothing


def goodput(interval: float, *, mtbf: float, checkpoint: float, restart: float) -> float:
    """The share of time that is useful work, from 0 to 1. All are seconds; `mtbf` and `interval` may be infinite."""
    if math.isinf(mtbf):
        return 1.0 if math.isinf(interval) else interval / (interval + checkpoint)
    length = (interval + checkpoint) / mtbf
    if length + restart / mtbf > MOST:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1(length))


def best_interval(mtbf: float, checkpoint: float) -> float:
    """The seconds of work between two checkpoints with the highest goodput; infinite if nothing fails.

    Young (1974) and Daly (2006) give approximations of it: sqrt(2 checkpoint mtbf), if failures are rare.
    """
    if math.isinf(mtbf):
        return math.inf
    low, high = 0.0, 1.0
    while high - low > 1e-15 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if middle + checkpoint / mtbf + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf
