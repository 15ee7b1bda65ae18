"""How many bytes live while torch's operators run, on tensors that may be fake."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.measure.aten_costs import tensors

expired = torch.UntypedStorage._expired  # as StorageWeakRef.expired does


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of storages after each operator, beyond those that lived at the beginning.

    Storages of `there` are known from the beginning: what of them goes counts against what comes.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = [0]
        self._now = 0
        self._open: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in there:
            self._enter(tensor, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, and asks it at each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; see what has gone and what has come."""
        made = func(*args, **(kwargs or {}))
        gone = [key for key, (reference, _) in self._open.items() if expired(reference.cdata)]
        self._now -= sum(self._open.pop(key)[1] for key in gone)
        known = {tensor.untyped_storage()._cdata for tensor in tensors((args, kwargs))}
        for tensor in tensors(made):
            if tensor.untyped_storage()._cdata not in known:
                self._enter(tensor, 1)
        self.held.append(self._now)
        return made

    def _enter(self, tensor: Tensor, counts: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._open:
            self._open[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
            self._now += counts * storage.nbytes()


class Returning(torch.autograd.Function):
    """Stands behind a layer, where its backward begins: makes the gradients of its outputs then and there."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        """Nothing but a place to begin."""
        ctx.likes = [(output.shape, output.dtype, output.device) for output in outputs]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gradients that nobody else holds."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)


def returning(outputs: Sequence[Tensor]) -> Tensor:
    """A number whose backward is that of the outputs."""
    found: Tensor = Returning.apply(*outputs)  # type: ignore[no-untyped-call]
    return found
