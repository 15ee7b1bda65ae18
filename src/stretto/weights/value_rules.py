"""Rules for the values of a weight: current, predicted or past ones.

`value(name, parameter)` returns the parameter itself where the rule uses its current values (then nothing is copied),
else a new tensor. `Substituted` and `Predicted` call `before` and `after` around each update, in which a rule keeps
what it needs of past weights; `state_dict` holds that for a checkpoint. `updates` counts the updates.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.master_weights import Masters
from stretto.optim.direction import check_direction, extrapolated, keep_updates
from stretto.optim.learning_rates import FutureRates, Scheduler
from stretto.optim.traits import check_momentum

Horizon = float | Callable[[int], float]  # how many updates ahead, or a function from the updates so far to that
Parameters = Mapping[str, Tensor]


class Rule(ABC):
    """The values that a forward, backward or recompute reads in place of a parameter's own."""

    horizon: Horizon = 0.0  # of a prediction, in updates: the longest, where groups of the optimizer have their own
    horizons: Mapping[int, float] = {}  # by the id of a parameter, where that is so

    def __init__(self) -> None:
        self.updates = 0

    @abstractmethod
    def value(self, name: str, parameter: Tensor) -> Tensor:
        """The values to use now: `parameter` itself, or a new tensor of its size. Called without gradients."""

    def before(self, parameters: Parameters) -> None:  # noqa: B027 (most rules keep nothing)
        """Called before the optimizer changes the parameters, by name."""

    def after(self, parameters: Parameters) -> None:
        """Called after the optimizer has changed the parameters, by name."""
        self.updates += 1

    def ahead(self) -> float:
        """How many updates ahead of the current weights the rule's values are; 0 for a rule that does not predict."""
        return self.horizon(self.updates) if callable(self.horizon) else self.horizon

    def ahead_of(self, parameter: Tensor) -> float:
        """As `ahead`, for one parameter."""
        return self.horizons[id(parameter)] if self.horizons else self.ahead()

    def held(self) -> Iterator[Tensor]:
        """The tensors that the rule keeps between updates."""
        for kept in self.state_dict().values():
            if isinstance(kept, Mapping):
                yield from kept.values()

    def forget(self) -> None:
        """Drop all that is known of past updates: the parameters have been set from outside."""
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the tensors kept of past weights, by the parameter's name."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.updates = state["updates"]


class CurrentRule(Rule):
    """The current weights."""

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """The parameter itself."""
        return parameter


class VelocityPrediction(Rule):
    """Where momentum alone would carry a weight: `w - lr h v`, v the optimizer's velocity, zero before its first step.

    SpecTrain (Chen et al. 2018, arXiv 1809.02839) and the velocity form of linear weight prediction (Kosson et al.
    2021, arXiv 2003.11666). Raises UsageError for an optimizer whose velocity means something else.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, horizon: Horizon) -> None:
        super().__init__()
        remedy = (
            "take optimizer sgd with momentum 0.9, or a prediction for other optimizers: method pipeoptim, or "
            "pb(predict=weight), which takes any"
        )
        check_momentum(optimizer, "velocity prediction", remedy)
        self.optimizer = optimizer
        self.horizon = horizon
        # By position: loading an optimizer's state replaces its groups and its state by other objects.
        self._group = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """`w - lr h v`; the parameter itself where h is 0 or the optimizer has no velocity yet."""
        ahead = self.ahead_of(parameter)
        velocity = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
        if ahead == 0 or velocity is None:
            return parameter
        rate = float(self.optimizer.param_groups[self._group[id(parameter)]]["lr"])
        return torch.add(parameter, velocity, alpha=-rate * ahead)


class StepPrediction(Rule):
    """Where the optimizer's own step would carry a weight: `w - (lr_1 + ... + lr_h) step`, w before its first step.

    PipeOptim (Guan et al. 2023, arXiv 2312.00839) and, for Adam, XPipe (Guan et al. 2019, arXiv 1911.04610): the step
    is SGD's velocity, Adam's `m_hat / (sqrt(v_hat) + eps)`, and for AdamW the weight decay beside it; those of NAdam,
    Muon, SOAP and Lion are derived in `optim/direction.py`. The rates are those of the coming updates, as the scheduler
    will set them. Copies no weights. Raises UsageError for other optimizers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, horizon: Horizon, scheduler: Scheduler | None = None) -> None:
        super().__init__()
        remedy = "use one of these, or predict='weight', which takes any optimizer"
        check_direction(optimizer, "prediction along the step", remedy)
        keep_updates(optimizer)
        self.optimizer = optimizer
        self.horizon = horizon
        self.rates = FutureRates(optimizer, scheduler)
        self._group = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """`w - (lr_1 + ... + lr_h) step`; the parameter itself where h is 0 or the optimizer has no state yet."""
        ahead = self.ahead_of(parameter)
        if ahead == 0 or not self.optimizer.state.get(parameter):
            return parameter
        group = self._group[id(parameter)]
        distance = self.rates.sum(group, self.updates, ahead)
        return extrapolated(self.optimizer, parameter, self.optimizer.param_groups[group], distance)


class WeightPrediction(Rule):
    """The last update repeated h times: `w + h (w_t - w_{t-1})`, for any optimizer; w before the first update.

    The weight form of linear weight prediction (Kosson et al. 2021, arXiv 2003.11666). Keeps the weights before the
    last update: one copy.
    """

    def __init__(self, horizon: Horizon) -> None:
        super().__init__()
        self.horizon = horizon
        self._former: dict[str, Tensor] = {}

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """`w + h (w_t - w_{t-1})`; the parameter itself where h is 0 or no update is known."""
        ahead = self.ahead_of(parameter)
        if ahead == 0 or name not in self._former:
            return parameter
        return torch.lerp(self._former[name], parameter, 1 + ahead)  # torch computes w - (w - former) * -h

    def before(self, parameters: Parameters) -> None:
        """Copy the weights."""
        if self.horizon != 0:
            remember(self._former, parameters)

    def forget(self) -> None:
        """No update has happened."""
        super().forget()
        self._former.clear()

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the weights before the last one under "former"."""
        return {**super().state_dict(), "former": dict(self._former)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state)
        self._former = {name: tensor.clone() for name, tensor in state["former"].items()}


class Correction(Rule):
    """What a weight probably was `span` updates ago: `u = w - span delta`, delta the average of the last updates.

    PipeMare's discrepancy correction T2 (Yang et al. 2021, arXiv 1910.05124): `delta <- gamma delta + (1 - gamma)
    (w_{t+1} - w_t)`, `gamma = decay^(1/span)`, span = tau_f - tau_b, the updates between a forward and its backward.
    Keeps delta: one copy; a second one for the time of an update. Span 0 keeps nothing: the weights as they stand.
    """

    def __init__(self, span: float, *, decay: float = math.exp(-2)) -> None:
        super().__init__()
        if span < 0 or not 0 < decay < 1:
            raise UsageError(f"a correction needs span >= 0 and 0 < decay < 1, not span={span}, decay={decay}")
        self.span = span
        self.gamma = decay ** (1 / span) if span else 0.0
        self._delta: dict[str, Tensor] = {}
        self._former: dict[str, Tensor] = {}

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """`w - span delta`; the parameter itself where span is 0 or no update is known."""
        if self.span == 0 or name not in self._delta:
            return parameter
        return torch.add(parameter, self._delta[name], alpha=-self.span)

    def before(self, parameters: Parameters) -> None:
        """Copy the weights, until `after` has subtracted them."""
        if self.span:
            remember(self._former, parameters)

    def after(self, parameters: Parameters) -> None:
        """Average the update into delta."""
        super().after(parameters)
        for name, former in self._former.items():
            change = torch.sub(parameters[name], former, out=former)
            if name not in self._delta:
                self._delta[name] = torch.zeros_like(change)
            self._delta[name].lerp_(change, 1 - self.gamma)
        self._former.clear()

    def forget(self) -> None:
        """No update has happened."""
        super().forget()
        self._delta.clear()

    def state_dict(self) -> dict[str, Any]:
        """The number of updates, and the average update under "delta"."""
        return {**super().state_dict(), "delta": dict(self._delta)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state)
        self._delta = {name: tensor.clone() for name, tensor in state["delta"].items()}


class Interpolated(Rule):
    """Between the current weights and the values of another rule: `part` 0 is the current weights, 1 the rule's.

    For a recompute, which runs between a predicted forward and its backward, or between a forward and its corrected
    backward. Shares the other rule's tensors and keeps none.
    """

    def __init__(self, rule: Rule, part: float) -> None:
        super().__init__()
        self.rule = rule
        self.part = part

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """`w + part (u - w)`, u the other rule's value."""
        if self.part == 0:
            return parameter
        value = self.rule.value(name, parameter)
        return value if self.part == 1 or value is parameter else torch.lerp(parameter, value, self.part)


def remember(copies: dict[str, Tensor], parameters: Parameters) -> None:
    """Copy the parameters into `copies`, into the tensors of an earlier copy if there is one."""
    for name, parameter in parameters.items():
        if name in copies:
            copies[name].copy_(parameter)
        else:
            copies[name] = parameter.detach().clone()


class Rounded(Rule):
    """`Rounded(rule, masters)`: the values of `rule` for a parameter's master, rounded to the parameter's dtype.

    The rule gets the tensors that the optimizer steps, as it would without masters, and needs no code for them.
    """

    def __init__(self, rule: Rule, masters: Masters) -> None:
        super().__init__()
        self.rule = rule
        self._masters = masters

    def value(self, name: str, parameter: Tensor) -> Tensor:
        """The rule's value for the master, in the parameter's dtype; the parameter if the rule returns the master."""
        master = self._masters.of(parameter)
        value = self.rule.value(name, master)
        return parameter if value is master else value.to(parameter.dtype)

    def before(self, parameters: Parameters) -> None:
        self.rule.before(self._masters_of(parameters))

    def after(self, parameters: Parameters) -> None:
        self.rule.after(self._masters_of(parameters))

    def ahead(self) -> float:
        return self.rule.ahead()

    def held(self) -> Iterator[Tensor]:
        return self.rule.held()

    def forget(self) -> None:
        """Drop the rule's record of past updates."""
        self.rule.forget()

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rule.load_state_dict(state)

    def _masters_of(self, parameters: Parameters) -> Parameters:
        return {name: self._masters.of(parameter) for name, parameter in parameters.items()}
