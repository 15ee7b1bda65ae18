"""A backward sees the weights current when it runs, not those that its forward saw; nothing is copied."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from stretto.errors import UsageError
from stretto.nn.batch import call
from stretto.weights import saved_tensor_check as check
from stretto.weights import unnoticed_changes
from stretto.weights.current import Current
from stretto.weights.saved_by_name import Read, Reads


class Live(Current):
    """Pipelined Backpropagation (Kosson et al. 2021, arXiv 2003.11666) and PACI: one version of the weights.

    `Live(module)`. The module is called as it is, its graph holds the parameters, and the optimizer changes them in
    place without autograd noticing. The first forward, and the first one after a change of mode, dtype or autocast, is
    checked: `forward` raises UsageError for a module whose backward would read a copy of a weight (`check.py`).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._checked: set[tuple[Any, ...]] = set()
        self._by_name = not unnoticed_changes.available()

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """The module's output, and None. Raises UsageError if its backward would not see the current weights."""
        assert behind == 0, f"weights {behind} updates back are asked for; only the current ones exist"
        conditions = check.forward_conditions(self.module, inputs)
        pack = Reads(self._named).pack if self._by_name else None
        if conditions not in self._checked:
            output = check.checked_call(self.module, inputs, pack, self._unpack)
            self._checked.add(conditions)
            return output, None
        # A hook set around the stage; `checked_call` has seen hooks set inside it.
        if pack is None and unnoticed_changes.innermost_hook() is not None:
            check.refuse("", self.module, *check.HOOKED)
        with saved_tensors_hooks(pack, self._unpack) if pack is not None else nullcontext():
            return call(self.module, inputs), None

    def update(self, step: Callable[[], object]) -> None:
        """Change the weights that graphs in flight hold. Raises UsageError if `step` gives a parameter new storage."""
        addresses = [parameter.data_ptr() for parameter in self._leaves]
        with nullcontext() if self._by_name else unnoticed_changes.unnoticed(self._leaves):
            step()
        if addresses != [parameter.data_ptr() for parameter in self._leaves]:
            raise UsageError(f"the optimizer gave a parameter new storage; change it in place, or {check.STASH}")

    def _unpack(self, saved: Tensor | Read) -> Tensor:
        return saved.of(self._named[saved.name].detach()) if isinstance(saved, Read) else saved
