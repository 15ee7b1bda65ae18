"""What the tensors of a network without data are: their dtype, and the memory format of images."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stretto.cost.attained import AUTOCAST, dtype_of_products
from stretto.errors import UsageError
from stretto.options.checks import one_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DTYPES = ("float32", "tfloat32", "bfloat16", "float16", f"bfloat16{AUTOCAST}", f"float16{AUTOCAST}")
MEMORY_FORMATS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class TensorFormat:
    """The dtype, one of DTYPES, and the memory format, one of MEMORY_FORMATS.

    tfloat32 are float32 tensors whose products run in TF32. With autocast weights are float32, and operators run in the
    types that torch.autocast gives them. Raises UsageError for others.
    """

    dtype: str = "float32"
    memory_format: str = "contiguous"

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPES)
        one_of("memory_format", self.memory_format, MEMORY_FORMATS)

    @property
    def weights(self) -> "torch.dtype":
        """The type of weights and of floating-point inputs."""
        import torch

        kept = self.dtype if self.dtype in ("bfloat16", "float16") else "float32"
        found: torch.dtype = getattr(torch, kept)
        return found

    @property
    def autocast(self) -> "torch.dtype | None":
        """The type of products under autocast; None without it."""
        import torch

        return getattr(torch, dtype_of_products(self.dtype)) if self.dtype.endswith(AUTOCAST) else None

    def converted(self, layers: "list[nn.Module]", example: "Tensor", name: str) -> "tuple[list[nn.Module], Tensor]":
        """The layers and an input batch in this format. Raises UsageError for channels last without images."""
        import torch

        example = example.to(self.weights) if example.is_floating_point() else example
        layers = [layer.to(self.weights) for layer in layers]
        if self.memory_format == "contiguous":
            return layers, example
        if example.dim() != 4:
            raise UsageError(f"memory_format={self.memory_format!r}: network {name!r} takes no images; leave it out")
        last = torch.channels_last
        for layer in layers:
            layer.to(memory_format=last)  # type: ignore[call-overload]  # as torch's tutorial has it
        return layers, example.contiguous(memory_format=last)


AS_TORCH_HAS_THEM = TensorFormat()
