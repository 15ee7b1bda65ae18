"""Splits a length as torch.tensor_split does: for stages, examples, channels, rows. No torch."""


def bounds(length: int, index: int, parts: int) -> tuple[int, int]:
    """The begin and end of part `index` of `parts`; the first `length % parts` of them are one longer."""
    size, longer = divmod(length, parts)
    begin = index * size + min(index, longer)
    return begin, begin + size + (index < longer)


def part_sizes(length: int, parts: int) -> tuple[int, ...]:
    size, longer = divmod(length, parts)
    return tuple(size + (index < longer) for index in range(parts))
