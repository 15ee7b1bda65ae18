"""Weights that a user changes between steps: a clamp, a mask, a state that is loaded, an average that is swapped in.

In the modules that are trained they are changed at once. But a replica that is emulated beside the first one has
modules of its own, and with precision="bf16" a float32 master would overwrite the change. Both follow at the next step.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stretto.errors import UsageError
from stretto.stage.stage import Stage

IN_PLACE = "change weights in place under torch.no_grad(), p.clamp_(-1, 1), or by load_state_dict, not through p.data"


class EditedWeights:
    """Finds what changed by version counters, 50 ns for each weight and buffer, where anything has to follow.

    `alike`: replicas have the same weights after each step. `shares_masters`: each has a part of the masters. A change
    through `.data` leaves the counter as it is: it is looked for by value before steps 2, 3, 5, 9, ...
    """

    def __init__(self, replicas: Sequence[Mapping[int, Stage]], *, alike: bool, shares_masters: bool) -> None:
        first, *others = ([pair for stage in stages.values() for pair in tensors_of(stage)] for stages in replicas)
        self._names = [name for name, _ in first]
        self._first = [tensor for _, tensor in first]
        self._others = [[tensor for _, tensor in other] for other in others]
        self._alike = alike
        self._masters = [
            (stage.index, parameter, master)
            for stages in replicas
            for stage in stages.values()
            for parameter, master in stage.masters.copies.items()
        ]
        self._shares_masters = shares_masters
        self._apart = self._differences()
        self._seen: list[int] = []
        self.remember()

    def _differences(self) -> list[list[int]]:
        # What the library itself does to weights, it does to those of all replicas.
        return [[a._version - b._version for a, b in zip(self._first, other, strict=True)] for other in self._others]

    def remember(self) -> None:
        """After a step: changes of low-precision weights from here on are the user's."""
        self._seen = [parameter._version for _, parameter, _ in self._masters]

    def follow(self, steps: int) -> None:
        """Before the step after so many: let everything follow. Raises UsageError where nothing can."""
        by_value = steps > 0 and not steps & (steps - 1)
        if self._others:
            if (apart := self._differences()) != self._apart:
                self._copy_to_others(apart)
            elif by_value and self._alike:
                self._compare_replicas()
        if self._masters:
            if [parameter._version for _, parameter, _ in self._masters] != self._seen:
                self._copy_to_masters()
            elif by_value and not self._shares_masters:
                self._compare_masters()

    @torch.no_grad()
    def _copy_to_others(self, apart: list[list[int]]) -> None:
        for other, now, before in zip(self._others, apart, self._apart, strict=True):
            for name, mine, theirs, changed, then in zip(self._names, self._first, other, now, before, strict=True):
                if changed == then:
                    continue
                if not self._alike:
                    raise UsageError(
                        f"{name} was changed between two steps in the first of {1 + len(self._others)} replicas, "
                        "which train by themselves: the others, emulated beside it, would keep theirs. Change it on "
                        "processes, each in its own replica, or use sync='all-reduce'"
                    )
                theirs.copy_(mine)
        self._apart = self._differences()

    def _compare_replicas(self) -> None:
        for other in self._others:
            for name, mine, theirs in zip(self._names, self._first, other, strict=True):
                if mine.requires_grad and not (torch.equal(mine, theirs) or torch.allclose(mine, theirs, rtol=1e-3)):
                    raise UsageError(
                        f"{name} was changed between two steps in the first of {1 + len(self._others)} replicas, where "
                        f"no other one could follow: {IN_PLACE}"
                    )

    @torch.no_grad()
    def _copy_to_masters(self) -> None:
        for index, parameter, master in self._masters:
            rounded = master.to(parameter.dtype)
            if torch.equal(parameter, rounded):
                continue
            if self._shares_masters:
                raise UsageError(
                    f"a weight of stage {index} was changed between two steps, but its float32 master is shared out "
                    "among replicas (precision='bf16', sync='shard-optimizer'): use sync='all-reduce'"
                )
            master.copy_(torch.where(parameter == rounded, master, parameter.to(master.dtype)))

    def _compare_masters(self) -> None:
        for index, parameter, master in self._masters:
            if not torch.equal(parameter, master.detach().to(parameter.dtype)):
                raise UsageError(
                    f"a weight of stage {index} was changed between two steps, which its float32 master "
                    f"(precision='bf16') does not see: {IN_PLACE}"
                )


def tensors_of(stage: Stage) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a stage and its head, with their names."""
    for prefix, part in ((f"{stage.index}.", stage.module), (f"heads.{stage.index}.", stage.head)):
        if part is not None:
            yield from ((prefix + name, tensor) for name, tensor in (*part.named_parameters(), *part.named_buffers()))
