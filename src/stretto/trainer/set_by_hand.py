"""Weights that a user sets by hand between steps: what else has copies of them follows, or the step is refused.

A plain loop goes on from whatever the parameters are. Here float32 masters, the copies of emulated replicas, servers,
the outer step of replicas and minibatches in flight hold weights of their own, which would come back without a word.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.nn.sharded_modules import is_sharded
from stretto.replicas import Sync
from stretto.stage.stage import Stage

Stages = Mapping[int, Stage]
Mark = tuple[int, int, int]  # of a tensor object, its storage and its values


class SetByHand:
    """What weights were after the last step. `check` looks at some 200 ns for each tensor, where copies are held."""

    def __init__(self, replicas: Sequence[Stages], sync: Sync, *, data: int, lag: int) -> None:
        """`replicas` are those of this process, of `data` in all; `lag` is how many minibatches may be in flight."""
        self._own, *self._copies = replicas
        self._sync, self._data, self._lag = sync, data, lag
        self._masters = any(stage.masters.copies for stages in replicas for stage in stages.values())
        kept = data > 1 and (sync.serving is not None or sync.agreement != "A" or sync.shares_optimizer)
        self._watches = bool(self._masters or self._copies or kept or lag)
        self._all = data > 1  # frozen parameters and buffers, too
        self._marks = self._marked()
        self._began = False

    def _tensors(self, stages: Stages) -> Iterator[tuple[str, Tensor]]:
        for index, stage in stages.items():
            for title, part in ((str(index), stage.module), (f"heads.{index}", stage.head)):
                if part is None or is_sharded(part):
                    continue
                for name, parameter in part.named_parameters():
                    if (self._all or parameter.requires_grad) and not stage.borrows(parameter):
                        yield f"{title}.{name}", parameter
                if self._all:
                    yield from ((f"{title}.{name}", buffer) for name, buffer in part.named_buffers())

    def _marked(self) -> dict[str, Mark]:
        return {name: mark(tensor) for name, tensor in self._tensors(self._own)} if self._watches else {}

    def remember(self) -> None:
        """Take the weights as they are for what training has made of them."""
        self._marks = self._marked()

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """In this block training itself may change weights and buffers."""
        changed = self._changed()
        yield
        self._marks = self._marked() | {name: before for name, before in self._marks.items() if name in changed}

    def _changed(self) -> list[str]:
        return [name for name, now in self._marked().items() if self._marks.get(name) != now]

    def check(self, *, drained: bool) -> None:
        """Let copies follow what was changed since. Raises UsageError where they cannot.

        `drained`: no minibatch is in flight.
        """
        if not self._watches:
            return
        changed = self._changed()
        if self._masters and not self._began:  # also what no version counter tells: parameter.data.copy_
            self._follow(self._own)
        self._began = True
        if not changed:
            return
        what = f"{changed[0]} was set by hand since the last step"
        fresh = not any(stage.updates for stage in self._own.values())
        if self._data > 1 and (self._sync.serving is not None or self._moved(changed)):
            raise UsageError(
                f"{what}; under sync={self._sync} other copies of it train: set weights before the Trainer is made"
            )
        if self._data > 1 and self._sync.agreement != "A" and not fresh:
            raise UsageError(
                f"{what}; under sync={self._sync} replicas differ between their meetings, and would not all have it: "
                "set weights before the first step, or choose sync='all-reduce'"
            )
        if self._lag and not drained:
            raise UsageError(
                f"{what}, while minibatches are in flight that were computed with it: call flush() before weights are "
                "set"
            )
        with torch.no_grad():
            given = dict(self._tensors(self._own))
            for copy in self._copies:
                for name, tensor in self._tensors(copy):
                    if name in changed:
                        tensor.copy_(given[name])
        for stages in (self._own, *self._copies):
            self._follow(stages)
            if fresh and self._data > 1:
                for stage in stages.values():
                    stage.begin_agreement()

    def _follow(self, stages: Stages) -> None:
        for stage in stages.values():
            stage.follow_weights()

    def _moved(self, changed: Sequence[str]) -> bool:
        # Whether a share of an optimizer steps views of memory that a parameter has left.
        if not self._sync.shares_optimizer or self._copies:
            return False
        given = dict(self._tensors(self._own))
        return any(name in self._marks and self._marks[name][1] != mark(given[name])[1] for name in changed)


def mark(tensor: Tensor) -> Mark:
    """What changes when a tensor is replaced, given other memory, or written to in place."""
    return id(tensor), 0 if tensor.is_meta else tensor.data_ptr(), tensor._version
