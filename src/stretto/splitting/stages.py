"""What `split` gives back: the stages, and why they are these."""

from collections.abc import Iterable, Sequence

from torch import nn

from stretto.splitting.cost import Costs


class Stages(list[nn.Module]):
    """Stages in order, as `stretto.Trainer` takes them; a plain list otherwise.

    `explanation` is a text table: what each stage holds and costs, how the cost was obtained, what had to stay
    together. Stage s holds the layers (blocks, if the model was cut between blocks) `bounds[s]` up to `bounds[s + 1]`.
    """

    def __init__(self, stages: Iterable[nn.Module], *, bounds: Sequence[int], explanation: str) -> None:
        super().__init__(stages)
        self.bounds = list(bounds)
        self.explanation = explanation


def explain(noun: str, bounds: Sequence[int], kinds: Sequence[str], costs: Costs, notes: Sequence[str]) -> str:
    """The table of `Stages.explanation`. `costs` holds one entry a stage."""
    total = sum(costs.values)
    rows = [("stage", f"{noun}s", "kinds", "cost", "share")]
    for index, (kind, cost) in enumerate(zip(kinds, costs.values, strict=True)):
        first, last = bounds[index], bounds[index + 1] - 1
        span = str(first) if first == last else f"{first}-{last}"
        rows.append((str(index), span, kind, costs.show(cost), f"{cost / total:.1%}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(
            cell.rjust(width) if column > 2 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    imbalance = max(costs.values) * len(costs.values) / total
    return "\n".join([*table, f"cost: {costs.how}; imbalance {imbalance:.2f} (largest stage / mean)", *notes])
