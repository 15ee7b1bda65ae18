"""A backward sees the weights as they stand when it runs, not as its forward saw them; nothing is copied."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.errors import UsageError
from stretto.nn.batch import call
from stretto.weights import check, guard
from stretto.weights.current import Current
from stretto.weights.reads import Read, Reads


class Live(Current):
    """Pipelined Backpropagation (Kosson et al. 2021, arXiv 2003.11666) and PACI: one version of the weights.

    `Live(module)`. The module is called as it is, its graph holds the parameters, and the optimizer changes them in
    place without autograd noticing. The first forward, and the first one after a change of mode, dtype or autocast, is
    checked: `forward` raises UsageError for a module whose backward would read a copy of a weight (`check.py`).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._checked: set[tuple[Any, ...]] = set()
        self._by_name = not guard.available()

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Call the module. Raises UsageError if its backward would not see the current weights."""
        assert behind == 0, f"weights {behind} updates back are asked for; only the current ones exist"
        circumstances = check.circumstances(self.module, inputs)
        pack = Reads(self._named).pack if self._by_name else None
        if circumstances not in self._checked:
            output = check.run(self.module, inputs, pack, self._unpack)
            self._checked.add(circumstances)
            return output, None
        if pack is None and guard.innermost_hook() is not None:  # around the stage; those inside it, `run` has seen
            check.refuse("", self.module, *check.HOOKED)
        with saved_tensors_hooks(pack, self._unpack) if pack is not None else nullcontext():
            return call(self.module, inputs), None

    def update(self, step: Callable[[], object]) -> None:
        """Change the weights under the graphs in flight. Raises UsageError if they are replaced, not changed."""
        before = [parameter.data_ptr() for parameter in self._leaves]
        with nullcontext() if self._by_name else guard.unnoticed(self._leaves):
            step()
        if before != [parameter.data_ptr() for parameter in self._leaves]:
            raise UsageError(f"the optimizer gave a parameter new storage; change it in place, or {check.STASH}")

    def _unpack(self, kept: Tensor | Read) -> Tensor:
        return kept.of(self._named[kept.name].detach()) if isinstance(kept, Read) else kept
