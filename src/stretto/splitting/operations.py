"""What each operation of a graph does, seen as the example runs: bytes, FLOPs, shared storage, changes in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stretto.nn.flop_counter import counting


@dataclass
class OperationRecord:
    """One operation: the bytes and storages of what it gives, its FLOPs, the storages that it reads and changes."""

    num_bytes: int
    flops: int
    floating: bool
    gives: set[int]
    reads: set[int]
    changes: set[int]


class OperationRecorder(fx.Interpreter):
    """Runs a graph without gradients and keeps a Sight of every node, in `seen`."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.seen: dict[fx.Node, OperationRecord] = {}
        self._storages: list[StorageWeakRef] = []  # an address is no other storage's while one of these knows it
        self._counter: FlopCounterMode | None = None

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph without gradients while FLOPs are counted."""
        with torch.no_grad(), counting() as self._counter:
            return super().run(*args, **options)

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation and record what it reads, gives, changes and costs."""
        assert self._counter is not None
        used = tensors(self.fetch_args_kwargs_from_env(n))
        fixed = {id(self.env[node]) for node in n.all_input_nodes if node.op == "get_attr"}
        before = [(x, x._version, x.clone() if id(x) in fixed and not x.requires_grad else None) for x in used]
        flops = self._counter.get_total_flops()
        value = super().run_node(n)
        flops = self._counter.get_total_flops() - flops
        # A kernel that moves statistics leaves no trace in their version.
        changed = [x for x, version, values in before if x._version != version or differs(x, values)]
        given = tensors(value)
        self.seen[n] = OperationRecord(
            num_bytes=sum(x.numel() * x.element_size() for x in given),
            flops=flops,
            floating=any(x.is_floating_point() for x in given),
            gives=self._places(given),
            reads=self._places(used),
            changes=self._places(changed),
        )
        return value

    def _places(self, values: list[Tensor]) -> set[int]:
        self._storages += [StorageWeakRef(x.untyped_storage()) for x in values]  # type: ignore[no-untyped-call]
        return {x.untyped_storage()._cdata for x in values}


def tensors(value: Any) -> list[Tensor]:
    """The tensors anywhere in a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def differs(x: Tensor, values: Tensor | None) -> bool:
    """Whether a buffer has been changed."""
    return values is not None and not torch.equal(x, values)


def held_together(order: Sequence[fx.Node], looks: Sequence[OperationRecorder]) -> set[int]:
    """Where no cut may fall: position p is before operation p.

    What is changed in place must be in the stage that made it, views of it too; a buffer that changes, in one stage.
    """
    barred: set[int] = set()
    for look in looks:
        changed = {place for node in order for place in look.seen[node].changes}
        touched: dict[int, list[int]] = {}
        changes: dict[int, int] = {}
        made = {place for node in order for place in look.seen[node].gives}
        kept = {p for n, sight in look.seen.items() if n.op == "get_attr" for p in sight.gives}
        for position, node in enumerate(order):
            sight = look.seen[node]
            for place in changed & (sight.gives | sight.reads):
                touched.setdefault(place, []).append(position)
                if place in sight.changes:
                    changes[place] = position
        for place, positions in touched.items():
            last = positions[-1] if place in kept else changes[place]
            barred.update(range(positions[0] + 1, last + 1))
        assert changed <= made | kept | {p for n, s in look.seen.items() if n.op == "placeholder" for p in s.gives}
    return barred
