"""A record of each operation of a graph, taken on the example: bytes, FLOPs, shared storages, in-place changes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stretto.nn.flop_counter import counting
from stretto.nn.memory_limit import bytes_of


@dataclass
class OperationRecord:
    """One operation: bytes of its outputs, its FLOPs, whether it gives a floating-point tensor, and storages.

    `gives`, `reads` and `changes` are the storages of its outputs, of its inputs, and of inputs that it overwrites.
    """

    num_bytes: int
    flops: int
    floating: bool
    gives: set[int]
    reads: set[int]
    changes: set[int]


class OperationRecorder(fx.Interpreter):
    """Runs a graph without gradients and keeps an OperationRecord of every node, in `records`."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.records: dict[fx.Node, OperationRecord] = {}
        self._storages: list[StorageWeakRef] = []  # keep addresses from being reused by other storages
        self._counter: FlopCounterMode | None = None

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph without gradients, counting FLOPs."""
        with torch.no_grad(), counting() as self._counter:
            return super().run(*args, **options)

    def run_node(self, n: fx.Node) -> Any:
        assert self._counter is not None
        inputs = tensors(self.fetch_args_kwargs_from_env(n))
        attributes = {id(self.env[node]) for node in n.all_input_nodes if node.op == "get_attr"}
        snapshots = [
            (tensor, tensor._version, tensor.clone() if id(tensor) in attributes and not tensor.requires_grad else None)
            for tensor in inputs
        ]
        flops = self._counter.get_total_flops()
        value = super().run_node(n)
        flops = self._counter.get_total_flops() - flops
        # A kernel that updates running statistics does not raise their version, so buffers are compared by value.
        changed = [tensor for tensor, version, copy in snapshots if tensor._version != version or differs(tensor, copy)]
        outputs = tensors(value)
        self.records[n] = OperationRecord(
            num_bytes=bytes_of(outputs),
            flops=flops,
            floating=any(tensor.is_floating_point() for tensor in outputs),
            gives=self._addresses(outputs),
            reads=self._addresses(inputs),
            changes=self._addresses(changed),
        )
        return value

    def _addresses(self, tensors: list[Tensor]) -> set[int]:
        self._storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]  # type: ignore[no-untyped-call]
        return {tensor.untyped_storage()._cdata for tensor in tensors}


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def differs(tensor: Tensor, copy: Tensor | None) -> bool:
    """Whether a tensor differs from its copy; False if none was made."""
    return copy is not None and not torch.equal(tensor, copy)


def held_together(order: Sequence[fx.Node], recorders: Sequence[OperationRecorder]) -> set[int]:
    """The positions where no cut may fall; position p is before operation p.

    A tensor that is changed in place, and its views, must stay in the stage that made it. A buffer that changes must
    stay in one stage.
    """
    barred: set[int] = set()
    for recorder in recorders:
        changed = {address for node in order for address in recorder.records[node].changes}
        touched: dict[int, list[int]] = {}
        last_change: dict[int, int] = {}
        made = {address for node in order for address in recorder.records[node].gives}
        attributes = {
            address for node, record in recorder.records.items() if node.op == "get_attr" for address in record.gives
        }
        for position, node in enumerate(order):
            record = recorder.records[node]
            for address in changed & (record.gives | record.reads):
                touched.setdefault(address, []).append(position)
                if address in record.changes:
                    last_change[address] = position
        for address, uses in touched.items():
            last = uses[-1] if address in attributes else last_change[address]
            barred.update(range(uses[0] + 1, last + 1))
        assert changed <= made | attributes | {
            address for node, record in recorder.records.items() if node.op == "placeholder" for address in record.gives
        }
    return barred
