"""What a step logs and returns: recorded where the output is, merged over micro-batches, replayed on every process."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from stretto.errors import UsageError
from stretto.lightning.batch_parts import size_of
from stretto.nn.nested import map_tensors


@dataclass
class Logged:
    """One call of `self.log`. Of a Metric, `path` is its name in the module and `value` that of the batch."""

    name: str
    value: Any
    options: dict[str, Any]
    path: str | None = None


@dataclass
class StepRecord:
    """What a step did with one micro-batch of `size` examples, of the loader's batch `owner`."""

    owner: int
    size: int | None
    logged: list[Logged] = field(default_factory=list)
    loss: Any = None  # of training: the mean loss, detached
    returned: Any = None  # what the step returned; of training without the loss


class LogRecorder:
    """Stands in for `self.log` while a step runs: it writes into a record, or nothing into None."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._record: StepRecord | None = None

    @contextmanager
    def recording(self, record: StepRecord | None) -> Iterator[None]:
        """In this block calls of `self.log` go into the record."""
        self._record = record
        self._module.__dict__["log"] = self._log
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def _log(self, name: str, value: Any, *given: Any, **options: Any) -> None:
        if self._record is None:
            return
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        options = {**dict(zip(names, given, strict=False)), **options}
        options.pop("enable_graph", None)  # a graph ends with its micro-batch
        options.pop("sync_dist_group", None)  # all processes get the same values
        path = None
        if isinstance(value, Metric):
            path = next((name for name, metric in metrics_of(self._module).items() if metric is value), None)
            path = options.get("metric_attribute") or path
            value = value._forward_cache
        self._record.logged.append(Logged(name, detached(value), options, path))


def detached(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.detach().clone(), value)


def on_cpu(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor.cpu(), value)


def merged(records: Sequence[StepRecord]) -> StepRecord:
    """The record of one of the loader's batches, from those of its micro-batches.

    Means are weighted by the examples of the micro-batches; sums, minima and maxima are taken of them.
    """
    first = records[0]
    if len(records) == 1:
        return first
    sizes = [record.size or 1 for record in records]
    names = [[call.name for call in record.logged] for record in records]
    for other in names:
        if other != names[0]:
            raise UsageError(
                f"training_step logs {', '.join(names[0])} of one micro-batch and {', '.join(other)} of another: "
                "self.log must be called alike for all micro-batches of a batch"
            )
    logged = []
    for calls in zip(*(record.logged for record in records), strict=True):
        weights = [call.options.get("batch_size") or size for call, size in zip(calls, sizes, strict=True)]
        value = reduced([call.value for call in calls], weights, calls[0].options.get("reduce_fx", "mean"))
        logged.append(Logged(calls[0].name, value, {**calls[0].options, "batch_size": sum(weights)}, calls[0].path))
    losses = reduced([record.loss for record in records], sizes, "mean")
    returned = together([record.returned for record in records], sizes)
    return StepRecord(first.owner, sum(sizes), logged, losses, returned)


def reduced(values: Sequence[Any], weights: Sequence[int], reduce_fx: Any) -> Any:
    """One value from those of several micro-batches; of dicts, one for each key; the last one of other objects."""
    if isinstance(values[0], Mapping):
        return {key: reduced([value[key] for value in values], weights, reduce_fx) for key in values[0]}
    if not all(isinstance(value, Tensor | int | float) for value in values):
        return values[-1]
    tensors = [torch.as_tensor(value) for value in values]
    name = getattr(reduce_fx, "__name__", str(reduce_fx)).lower()
    if name in ("sum", "min", "max"):
        stacked = torch.stack(tensors)
        return stacked.sum(0) if name == "sum" else getattr(stacked, f"a{name}")(0)
    share = [weight / sum(weights) for weight in weights]
    total: Tensor = sum((tensor * part for tensor, part in zip(tensors, share, strict=True)), torch.zeros(()))
    return total


def together(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """What a step returned for several micro-batches: rows one after the other, means of single numbers."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: together([value[key] for value in values], sizes) for key in first}
    if isinstance(first, Tensor) and first.dim() and [size_of(value) for value in values] == list(sizes):
        return torch.cat(list(values))
    return reduced(values, sizes, "mean")


def replay(module: LightningModule, record: StepRecord, *, current: bool) -> None:
    """Call `self.log` as the step did. `current`: the record is of the batch that Lightning is at."""
    metrics = metrics_of(module)
    for call in record.logged:
        options = dict(call.options)
        if not current:
            options.setdefault("batch_size", record.size)
        value = call.value
        if call.path is not None:
            metrics[call.path]._forward_cache = value
            value = metrics[call.path]
        module.log(call.name, value, **options)


def logged_on_step(record: StepRecord) -> dict[str, Any]:
    """What loggers get of a training step, under the names that Lightning gives it."""
    values: dict[str, Any] = {}
    for call in record.logged:
        on_step, on_epoch = call.options.get("on_step"), bool(call.options.get("on_epoch"))
        if call.options.get("logger", True) and (on_step is None or on_step):  # on_step is True in training
            name = f"{call.name}_step" if on_epoch else call.name
            values |= {name: call.value} if not isinstance(call.value, Mapping) else dict(call.value)
    return values


def metrics_of(module: LightningModule) -> dict[str, Metric]:
    """The module's torchmetrics objects by their names."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def counts(module: LightningModule) -> dict[str, int]:
    """How often each Metric has been updated."""
    return {name: metric._update_count for name, metric in metrics_of(module).items()}


def metric_states(module: LightningModule, before: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """The states of the Metrics that were updated since `counts` returned `before`."""
    return {
        name: state_of(metric) for name, metric in metrics_of(module).items() if metric._update_count != before[name]
    }


def state_of(metric: Metric) -> dict[str, Any]:
    """All that an update changes of a Metric, as a copy."""
    names = (*metric._defaults, "_update_count", "_forward_cache", "_computed")
    return copy.deepcopy({name: detached(getattr(metric, name)) for name in names})


def set_metrics(module: LightningModule, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Give Metrics the states that `metric_states` returned in another process."""
    metrics = metrics_of(module)
    for path, state in states.items():
        device = metrics[path].device
        for name, value in state.items():
            setattr(metrics[path], name, map_tensors(partial(Tensor.to, device=device), value))


@contextmanager
def metrics_protected(module: LightningModule) -> Iterator[None]:
    """In this block Metrics may be updated; afterwards they are as before."""
    before = {name: state_of(metric) for name, metric in metrics_of(module).items()}
    try:
        yield
    finally:
        set_metrics(module, before)


@contextmanager
def metrics_alone(module: LightningModule) -> Iterator[None]:
    """In this block no Metric asks other processes for their states: they all hold the same."""
    metrics = list(metrics_of(module).values())
    before = [metric.distributed_available_fn for metric in metrics]
    try:
        for metric in metrics:
            metric.distributed_available_fn = _alone
        yield
    finally:
        for metric, function in zip(metrics, before, strict=True):
            metric.distributed_available_fn = function


def _alone() -> bool:
    return False
