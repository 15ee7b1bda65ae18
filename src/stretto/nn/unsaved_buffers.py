"""Buffers that a module's state_dict leaves out (persistent=False): training that goes on needs those that change."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class UnsavedBuffers:
    """The buffers of modules that their state_dict leaves out, and which of them have changed since this was made."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = {name: (buffer, buffer._version) for name, buffer in self._buffers().items()}

    def _buffers(self) -> dict[str, Tensor]:
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in self._module.named_modules()
            for name in module._non_persistent_buffers_set
            if (buffer := module._buffers.get(name)) is not None
        }

    def state_dict(self) -> dict[str, Tensor]:
        """Those that have changed, by name."""
        return {
            name: buffer
            for name, buffer in self._buffers().items()
            if name not in self._first or self._first[name][0] is not buffer or self._first[name][1] != buffer._version
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set those that a state has. Raises KeyError for a buffer that the modules do not have."""
        known = self._buffers()
        for name, value in state.items():
            if known[name].shape == value.shape:
                known[name].copy_(value)
            else:
                path, _, field = name.rpartition(".")
                self._module.get_submodule(path)._buffers[field] = value.to(known[name].device)
