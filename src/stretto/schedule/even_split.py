"""What "cut as torch.tensor_split cuts" means, wherever something is: stages, examples, channels, rows. No torch."""


def bounds(length: int, index: int, parts: int) -> tuple[int, int]:
    """Where one of so many parts begins and ends: the first `length % parts` of them are one longer."""
    size, longer = divmod(length, parts)
    begin = index * size + min(index, longer)
    return begin, begin + size + (index < longer)


def part_sizes(length: int, parts: int) -> tuple[int, ...]:
    """How long each part is."""
    size, longer = divmod(length, parts)
    return tuple(size + (index < longer) for index in range(parts))
