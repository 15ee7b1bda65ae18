"""What a collective takes among processes that compute before it and after it, as training runs it. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from stretto.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Amount = TypeVar("Amount", float, "NDArray[np.float64]")

GRADIENTS = "gradients"  # replicas meet and sum their gradients: packing, messages, unpacking, waiting for each other
SHARDING = "sharding"  # beside a meeting of replicas: weights gathered once, gradients scattered once, a step
RESHARDING = "resharding"  # the same with weights gathered again for the backward
TENSOR_SUM, TENSOR_GATHER = "tensor-sum", "tensor-gather"  # of processes that share weights
TENSOR_SCATTER = "tensor-scatter"  # takes what a gather takes, and is not measured
HALO = "halo"  # rows for the neighbours of a slab, and theirs
NAMES = (GRADIENTS, SHARDING, RESHARDING, TENSOR_SUM, TENSOR_GATHER, HALO)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Seconds: calls x per_call + tensors x per_tensor + bytes x per_byte, measured among `processes`.

    Bytes are those of whole tensors. `residual` is the root mean square of the fit's relative errors. Raises UsageError
    for numbers out of range.
    """

    processes: int
    per_call: float
    per_byte: float
    per_tensor: float = 0.0
    residual: float | None = None

    def __post_init__(self) -> None:
        if self.processes < 2:
            raise UsageError(f"processes = {self.processes}: a collective takes 2 or more")
        for key in ("per_call", "per_byte", "per_tensor"):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise UsageError(f"{key} = {value:g}: it must be 0 or more; measure it again with stretto calibrate")

    def seconds(
        self, processes: int, num_bytes: Amount, *, calls: Amount | float = 1.0, tensors: Amount | float = 0.0
    ) -> Amount:
        """Seconds among so many processes: a call's grow with the messages of a ring, a byte's with what each sends."""
        messages = (processes - 1) / (self.processes - 1)
        sent = (processes - 1) / processes * self.processes / (self.processes - 1)
        return messages * calls * self.per_call + tensors * self.per_tensor + sent * num_bytes * self.per_byte

    def or_slower(self, other: "Collective") -> "Collective":
        """The slower value of each field."""
        return Collective(
            processes=min(self.processes, other.processes),
            per_call=max(self.per_call, other.per_call),
            per_byte=max(self.per_byte, other.per_byte),
            per_tensor=max(self.per_tensor, other.per_tensor),
        )


def slower(one: Mapping[str, Collective], other: Mapping[str, Collective]) -> dict[str, Collective]:
    """The collectives that both links know, each as the slower one."""
    return {name: one[name].or_slower(other[name]) for name in one.keys() & other.keys()}
