"""The list of stages that `split` returns, and the table that explains it."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from stretto.errors import UsageError, nearest
from stretto.options.checks import mapping, of_kind
from stretto.splitting.cost import PieceCosts


class Stages(list[nn.Module]):
    """A list of stages in order, as `stretto.Trainer` takes them.

    `explanation` is a text table: what each stage holds and costs, how the cost was obtained, and what had to stay
    together. `shares` are the stages' shares of that cost. `uneven` is a warning with a remedy if one stage is too
    large, else "". `exported` says whether they are cut from an exported graph, which takes inputs of the example's
    sizes only, but any number of rows. Stage s holds the layers `bounds[s]` up to `bounds[s + 1]`, or the blocks,
    modules or pieces of a graph if the model was cut between those.
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
        exported: bool = False,
    ) -> None:
        super().__init__(stages)
        self.bounds = list(bounds)
        self.explanation = explanation
        self.shares = list(shares)
        self.uneven = uneven
        self.exported = exported
        self._model = model if isinstance(model, nn.Module) else nn.ModuleList(model)
        self._names = names_in(self._model, self)
        #: The mode of each module of the model when it was cut: whether it trains.
        self.modes = {module: module.training for module in self._model.modules()}

    @property
    def model(self) -> nn.Module:
        """The model that was cut; a list of layers as an nn.ModuleList."""
        return self._model

    def name_in_model(self, key: str) -> str | None:
        """The name in the model of a weight "<stage>.<name>"; None for one that an earlier stage has, too (tied)."""
        own = self._key(key)
        names = self._names[own]
        first = next(other for other, others in self._names.items() if others == names)
        return names[0] if names and first == own else None

    def first_name_in_model(self, key: str) -> str | None:
        """The first name in the model of a weight "<stage>.<name>", also of one that several stages have."""
        return next(iter(self._names[self._key(key)]), None)

    def model_state(self, gathered: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that `trainer.gather()` returned, under the names that `model.load_state_dict` takes.

        Heads are left out. Weights that no stage uses are the model's own. On one process the model itself is trained,
        and needs no state from here. Raises UsageError for weights of no stage.
        """
        mapping("gathered", gathered, "what trainer.gather() returned on rank 0: a dict of tensors by name")
        state: dict[str, Tensor] = dict(self._model.state_dict())
        for key, value in gathered.items():
            if not key.startswith("heads."):
                names = self._names[self._key(key)]
                of_kind(f"gathered[{key!r}]", value, Tensor, "a tensor")
                state.update(dict.fromkeys(names, value))
        return state

    def _key(self, weight: str) -> str:
        """The key in `_names` of a weight "<stage>.<name>" as a trainer names it."""
        key = weight.replace("_orig_mod.", "")  # torch.compile adds this prefix
        if key not in self._names:
            raise UsageError(f"{weight!r} is no weight of these {len(self)} stages: {nearest(key, self._names)}")
        return key


def names_in(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, list[str]]:
    """The names in the model of each weight "<stage>.<name>" of the stages; a tied weight has several."""
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return {
        f"{index}.{name}": names.get(id(value), [])
        for index, stage in enumerate(stages)
        for name, value in stage.state_dict(keep_vars=True).items()
    }


def explain(noun: str, bounds: Sequence[int], kinds: Sequence[str], costs: PieceCosts, notes: Sequence[str]) -> str:
    """The text of `Stages.explanation`: a table, a line on costs, and `notes`. `costs` holds one entry a stage."""
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
