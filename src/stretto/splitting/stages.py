"""What `split` gives back: the stages, and why they are these."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.options.checks import mapping, of_kind
from stretto.splitting.cost import PieceCosts


class Stages(list[nn.Module]):
    """Stages in order, as `stretto.Trainer` takes them; a plain list otherwise.

    `explanation` is a text table: what each stage holds and costs, how the cost was obtained, what had to stay
    together. `shares` are the stages' shares of that cost, `uneven` what there is to say if one of them is too large,
    and what to do about it. Stage s holds the layers (blocks, modules or pieces of a
    graph, if the model was cut between those) `bounds[s]` up to `bounds[s + 1]`.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        *,
        model: nn.Module | Sequence[nn.Module],
        bounds: Sequence[int],
        explanation: str,
        shares: Sequence[float],
        uneven: str = "",
    ) -> None:
        super().__init__(stages)
        self.bounds = list(bounds)
        self.explanation = explanation
        self.shares = list(shares)
        self.uneven = uneven
        self._model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self._names = names_in(self._model, self)

    def model_state(self, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `trainer.gather()` gave, under the names that `model.load_state_dict` knows.

        Heads are left out; what no stage uses is as the model has it. On one process the model itself is trained, and
        there is no need of this. Raises UsageError for weights that are no stage's.
        """
        mapping("gathered", gathered, "what trainer.gather() returned on rank 0: a dict of tensors by name")
        state: dict[str, Tensor] = dict(self._model.state_dict())
        for key, value in gathered.items():
            if not key.startswith("heads."):
                plain = key.replace("_orig_mod.", "")  # of a compiled stage
                if plain not in self._names:
                    raise UsageError(f"{key!r} is no weight of these {len(self)} stages: {nearest(plain, self._names)}")
                of_kind(f"gathered[{key!r}]", value, Tensor, "a tensor")
                state.update(dict.fromkeys(self._names[plain], value))
        return state


def names_in(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, list[str]]:
    """What each weight of the stages, "<stage>.<name>", is called in the model: tied ones have several names there."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return {
        f"{index}.{name}": names.get(id(value), [])
        for index, stage in enumerate(stages)
        for name, value in stage.state_dict(keep_vars=True).items()
    }


def explain(noun: str, bounds: Sequence[int], kinds: Sequence[str], costs: PieceCosts, notes: Sequence[str]) -> str:
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
