"""The share of time in which workers stand still, as people read it."""

RESOLUTION = 0.005  # of the time; less is the rounding of floating-point times, or nothing that anybody can use


def idle_share(share: float, digits: int = 0) -> str:
    """A bubble in per cent, "none" where it is below RESOLUTION.

    >>> idle_share(1e-12), idle_share(0.4286), idle_share(0.4286, 1)
    ('none', '43%', '42.9%')
    """
    return "none" if share < RESOLUTION else f"{share:.{digits}%}"
