"""Several optimizers as one: each parameter group is stepped by the rule of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stretto.optim.layerwise import with_gradients
from stretto.optim.sharded_muon import ShardedMuon
from stretto.options.checks import refuse, sequence

RULES: dict[str, type[torch.optim.Optimizer]] = {"Muon": ShardedMuon, "AdamW": torch.optim.AdamW}


class CombinedOptimizer(torch.optim.Optimizer):
    """One optimizer of several: `CombinedOptimizer([torch.optim.Muon(...), torch.optim.AdamW(...)])`.

    Its groups are theirs, each with its own options and with the name of its rule, "Muon" or "AdamW", under "rule"; the
    state of a parameter is that of its rule. Schedulers, checkpoints and whatever reads groups see one optimizer. It
    takes over the given optimizers, which are not to be stepped any more.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        wanted = f"a list of optimizers, each one of {', '.join(RULES)} of torch.optim"
        sequence("CombinedOptimizer: optimizers", optimizers, wanted)
        if not len(optimizers):
            refuse("CombinedOptimizer: optimizers", optimizers, wanted)
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers:
            rule = type(optimizer).__name__
            if not isinstance(optimizer, torch.optim.Optimizer) or rule not in RULES:
                refuse("CombinedOptimizer: optimizers", optimizers, wanted)
            groups += [{**group, "rule": rule} for group in optimizer.param_groups]
        super().__init__(groups, {})

    def has_rule(self, rule: str) -> bool:
        """Whether one of its groups has this rule."""
        return rule in rules_of(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Let each rule step its groups; return the closure's loss, if there is one."""
        loss = with_gradients(closure)
        for rule, kind in RULES.items():
            groups = [group for group in self.param_groups if group["rule"] == rule]
            if groups:  # made anew: what schedulers and loading replace is then never an old one
                stepping(kind, self.state, groups).step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if its groups have other rules."""
        rules, saved = rules_of(self.param_groups), rules_of(state_dict["param_groups"])
        if rules != saved:
            raise ValueError(f"groups of the rules {saved}, expected {rules}")
        super().load_state_dict(state_dict)


def stepping(
    kind: type[torch.optim.Optimizer], state: Mapping[Any, Any], groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """An optimizer of a kind that steps another one's groups with its state."""
    made = kind.__new__(kind)
    made.__setstate__({"defaults": {}, "state": state, "param_groups": groups})
    return made


def rules_of(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """The name of each group's rule."""
    return [group.get("rule") for group in groups]
