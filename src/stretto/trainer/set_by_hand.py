"""Weights that a user sets by hand between steps: what else has copies of them follows, or the step is refused.

A plain loop goes on from whatever the parameters are. Here float32 masters, the copies of emulated replicas, servers,
the outer step of replicas and minibatches in flight hold weights of their own, which would come back without a word.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from stretto.errors import UsageError
from stretto.nn.sharded_modules import is_sharded
from stretto.replicas import Sync
from stretto.stage.stage import Stage

Stages = Mapping[int, Stage]
Place = tuple[
    str, dict[str, Tensor | None], str
]  # the name of a parameter or buffer, its module's dict, its name there
Mark = tuple[Tensor | None, int, int]  # a tensor, its memory, and how often it was written to


UNSEEN = (
    "was set by hand through .data, which leaves no trace, so that copies of it (replicas, float32 masters) could not "
    "follow: change weights under torch.no_grad(), as in p.clamp_(-1, 1), or by load_state_dict"
)


class SetByHand:
    """What weights were after the last step. Where copies are held, `check` takes some 200 ns for each tensor."""

    def __init__(self, replicas: Sequence[Stages], sync: Sync, *, data: int, lag: int) -> None:
        """`replicas` are those of this process, of `data` in all; `lag` is how many minibatches may be in flight."""
        self._own, *self._copies = replicas
        self._sync, self._data, self._lag = sync, data, lag
        self._masters = any(stage.masters.copies for stages in replicas for stage in stages.values())
        kept = data > 1 and (sync.serving is not None or sync.agreement != "A" or sync.shares_optimizer)
        watches = bool(self._masters or self._copies or kept or lag)
        self._places = places_of(self._own, buffers=data > 1) if watches else []
        self._marks = self._marked()
        self._began = False

    def _marked(self) -> list[Mark]:
        return [mark(held.get(name)) for _, held, name in self._places]

    def _changed(self) -> list[int]:
        # The numbers of the places whose tensors are not as they were.
        return [
            number
            for number, (now, then) in enumerate(zip(self._marked(), self._marks, strict=True))
            if now[0] is not then[0] or now[1:] != then[1:]
        ]

    def remember(self) -> None:
        """Take the weights as they are for what training has made of them."""
        self._marks = self._marked()

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """In this block training itself may change weights and buffers."""
        changed, before = self._changed(), self._marks
        try:
            yield
        finally:
            self._marks = self._marked()
            for number in changed:
                self._marks[number] = before[number]

    def check(self, steps: int, *, drained: bool) -> None:
        """Let copies follow what was changed since, before the step after so many. Raises UsageError where they cannot.

        `drained`: no minibatch is in flight. What no version counter tells (`parameter.data.clamp_`) is looked for by
        value before the first step, where copies follow, and before steps 2, 3, 5, 9, ..., where it is refused.
        """
        if not self._places:
            return
        if self._masters and not self._began:  # also what no version counter tells: parameter.data.copy_
            self._follow(self._own)
        self._began = True
        if changed := self._changed():
            self._refuse(changed, drained)
            self._copy(changed)
        elif steps and not steps & (steps - 1):
            self._compare()

    def _compare(self) -> None:
        # Masters with their parameters, and copies with the first replica's parameters.
        for stages in (self._own, *self._copies) if not self._sync.shares_optimizer else ():
            for index, stage in stages.items():
                for parameter, master in stage.masters.copies.items():
                    if not same(parameter, master.detach().to(parameter.dtype)):
                        raise UsageError(f"a weight of stage {index} {UNSEEN}")
        places = places_of(self._own, buffers=False)
        for copy in self._copies if self._sync.agreement == "A" else ():
            for (title, held, name), (_, other, _) in zip(places, places_of(copy, buffers=False), strict=True):
                one, two = held[name], other[name]
                if one is None or two is None or same(one, two, rtol=1e-3):
                    continue
                raise UsageError(f"{title} {UNSEEN}")

    def _refuse(self, changed: Sequence[int], drained: bool) -> None:
        for number in changed:
            title, held, name = self._places[number]
            before, memory, _ = self._marks[number]
            now = held.get(name)
            if isinstance(before, nn.Parameter) and now is not before:
                raise UsageError(
                    f"{title} is another parameter since the last step, which no optimizer has: change its values in "
                    "place, under torch.no_grad(), or make the Trainer again"
                )
            lost = self._masters or mark(now)[1] != memory  # a share of the optimizer steps views of the memory
            shared = self._sync.shares_optimizer and not self._copies and lost
            if self._data > 1 and (self._sync.serving is not None or shared):
                raise UsageError(
                    f"{title} was set by hand since the last step; under sync={self._sync} other copies of it train: "
                    "set weights before the Trainer is made"
                )
        what = f"{self._places[changed[0]][0]} was set by hand since the last step"
        if self._data > 1 and self._sync.agreement != "A" and not self._fresh:
            raise UsageError(
                f"{what}; under sync={self._sync} replicas differ between their meetings, and would not all have it: "
                "set weights before the first step, or choose sync='all-reduce'"
            )
        if self._lag and not drained:
            raise UsageError(
                f"{what}, while minibatches are in flight that were computed with it: call flush() before weights are "
                "set"
            )

    @property
    def _fresh(self) -> bool:
        return not any(stage.updates for stage in self._own.values())

    @torch.no_grad()
    def _copy(self, changed: Sequence[int]) -> None:
        for copy in self._copies:
            places = places_of(copy, buffers=True)
            for number in changed:
                _, held, name = self._places[number]
                _, other, there = places[number]
                given, taking = held.get(name), other.get(there)
                if given is None or taking is None:
                    continue
                if given.shape == taking.shape:
                    taking.copy_(given)
                else:  # a buffer that grew, such as a mask
                    other[there] = given.clone()
        for stages in (self._own, *self._copies):
            self._follow(stages)
            if self._fresh and self._data > 1:
                for stage in stages.values():
                    stage.begin_agreement()

    def _follow(self, stages: Stages) -> None:
        for stage in stages.values():
            stage.follow_weights()


def places_of(stages: Stages, *, buffers: bool) -> list[Place]:
    """Where the weights of stages are that their optimizers step; with frozen ones and buffers if `buffers`."""
    places: list[Place] = []
    for index, stage in stages.items():
        for title, part in ((str(index), stage.module), (f"heads.{index}", stage.head)):
            if part is None or is_sharded(part):
                continue
            for path, module in part.named_modules():
                prefix = f"{title}.{path}".rstrip(".")
                for name, parameter in module._parameters.items():
                    if parameter is not None and (buffers or parameter.requires_grad) and not stage.borrows(parameter):
                        places.append((f"{prefix}.{name}", cast(Any, module._parameters), name))
                if buffers:
                    places += [(f"{prefix}.{name}", module._buffers, name) for name in module._buffers]
    return places


def mark(tensor: Tensor | None) -> Mark:
    """What changes when a tensor is replaced, given other memory, or written to in place."""
    if tensor is None:
        return None, 0, 0
    if isinstance(tensor, FakeTensor):  # which warns of being asked for its memory
        return tensor, 0, tensor._version
    try:
        memory = tensor.data_ptr()
    except RuntimeError:  # sparse tensors have none, nor those without values
        memory = 0
    return tensor, memory, 0 if tensor.is_inference() else tensor._version


def same(one: Tensor, other: Tensor, rtol: float = 0.0) -> bool:
    """Whether two tensors are equal, or nearly, where both may hold what is not a number: training may diverge."""
    return torch.equal(one, other) or torch.allclose(one, other, rtol=rtol, atol=1e-8 if rtol else 0, equal_nan=True)
