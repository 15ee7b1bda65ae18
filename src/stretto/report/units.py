"""Numbers as text, with few digits and a unit."""

import math
import re
from collections.abc import Callable

_FLOP = {1e18: "EFLOP", 1e15: "PFLOP", 1e12: "TFLOP", 1e9: "GFLOP", 1e6: "MFLOP", 1e3: "kFLOP", 1.0: "FLOP"}
_BYTES = {2.0**40: "TiB", 2.0**30: "GiB", 2.0**20: "MiB", 2.0**10: "KiB", 1.0: "B"}
_TIME = {1.0: "s", 1e-3: "ms", 1e-6: "µs"}
_WATT_HOURS = {1e6: "MWh", 1e3: "kWh", 1.0: "Wh", 1e-3: "mWh", 1e-6: "µWh"}
NONE = "–"


def flop_unit(largest: float) -> tuple[float, str]:
    """The unit for FLOP counts up to `largest`: (FLOP in one unit, its name)."""
    scale = next((scale for scale in _FLOP if largest >= scale), 1.0)
    return scale, _FLOP[scale]


def flops(value: float | None) -> str:
    """A FLOP count with its unit.

    >>> flops(1.234e12)
    '1.23 TFLOP'
    """
    if value is None:
        return NONE
    scale, name = flop_unit(value)
    return f"{number(value / scale)} {name}"


def byte_unit(largest: float) -> tuple[float, str]:
    """The unit for memory up to `largest` bytes: (bytes in one unit, its name)."""
    scale = next((scale for scale in _BYTES if largest >= scale), 1.0)
    return scale, _BYTES[scale]


def bytes_held(value: float) -> str:
    """Bytes with their unit.

    >>> bytes_held(3 * 2**20)
    '3.00 MiB'
    """
    scale, name = byte_unit(value)
    return f"{number(value / scale)} {name}"


def energy(joules: float | None) -> str:
    """Energy in watt hours.

    >>> energy(5400)
    '1.50 Wh'
    """
    if joules is None:
        return NONE
    hours = joules / 3600
    scale, name = next(((scale, name) for scale, name in _WATT_HOURS.items() if hours >= scale), (1e-6, "µWh"))
    return f"{number(hours / scale)} {name}"


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where one can be avoided."""
    if value is None:
        return NONE
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:.{max(0, digits)}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share of one in per cent, e.g. `12.5 %`."""
    return NONE if value is None else f"{100 * value:.{digits}f} %"


def bleu(value: float | None) -> str:
    """BLEU, from 0 to 100, as it is published.

    >>> bleu(34.5)
    '34.5'
    """
    return NONE if value is None else f"{value:.1f}"


def cutoff(value: float, is_share: bool) -> str:
    """A cut-off, which is a round number, with no more digits than it has."""
    return f"{100 * value:.6g} %" if is_share else f"{value:.6g}"


def times(value: float | None) -> str:
    """A ratio, e.g. `3.1×`."""
    return NONE if value is None else f"{value:.1f}×" if value >= 0.95 else f"{value:.2f}×"


def span(low: float, high: float, form: Callable[[float], str]) -> str:
    """A range of values that are written alike; the value alone if its ends read the same.

    >>> span(2.1, 3.14, times)
    '2.1 to 3.1×'
    """
    first, last = form(low), form(high)
    if first == last:
        return last
    unit = re.sub(r"^[\d.]+(e[+-]\d+)?", "", last)
    return f"{first.removesuffix(unit) if unit else first} to {last}"


def seconds(value: float | None) -> str:
    """Seconds as seconds, minutes or hours."""
    if value is None:
        return NONE
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    if value >= 90:
        return f"{value / 60:.1f} min"
    return f"{number(value)} s"


def time_unit(largest: float) -> tuple[float, str]:
    """The unit for times up to `largest` seconds: (seconds in one unit, its name)."""
    scale = next((scale for scale in _TIME if largest >= scale), 1e-6)
    return scale, _TIME[scale]


def duration(value: float) -> str:
    """Seconds as s, ms or µs.

    >>> duration(0.0123), duration(-0.0123)
    ('12.3 ms', '-12.3 ms')
    """
    scale, name = time_unit(abs(value))
    return f"{number(value / scale)} {name}"


def part(seconds: float, mean: float, least: float, most: float) -> str:
    """What a part takes: its seconds, its share, and the range of the share where that varies.

    >>> part(0.002, 0.125, 0.125, 0.125), part(0.002, 0.125, 0.1, 0.15)
    ('2 ms, 12.5 %', '2 ms, 12.5 % (10.0 % to 15.0 %)')
    """
    low, high = percent(least), percent(most)
    return f"{duration(seconds)}, {percent(mean)}" + f" ({low} to {high})" * (low != high)


def short(value: float) -> float:
    """Rounded to five significant digits: as much as a chart can show, at half the size on the page."""
    return float(f"{value:.5g}")
