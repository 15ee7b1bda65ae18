"""Learning rate and momentum for another batch size."""

import math

from stretto.errors import UsageError


def scale_for_batch(lr: float, momentum: float, batch_size: int, *, to: int) -> tuple[float, float]:
    """The learning rate and momentum of SGD for updates of `to` examples, from those that suit `batch_size` examples.

    `m' = m^(to / B)`, `lr' = lr (to / B) (1 - m') / (1 - m)`: an example's gradient adds as much in all, over as many
    examples (Kosson et al. 2021, arXiv 2003.11666). For torch.optim.SGD's momentum, `v <- m v + g; w <- w - lr v`.
    """
    if not 0 < lr < math.inf:
        raise UsageError(f"lr={lr!r}: a learning rate is a positive number")
    if not 0 <= momentum < 1:
        raise UsageError(f"momentum={momentum!r}: choose a value from 0 up to, but not including, 1")
    for name, size in (("batch_size", batch_size), ("to", to)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{name}={size!r}: a whole number of examples, at least 1")
    share = to / batch_size
    scaled: float = momentum**share
    return lr * share * (1 - scaled) / (1 - momentum), scaled
