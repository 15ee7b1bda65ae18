"""Spatial parallelism: the rows and columns of an image on several processes.

`geometry`, `route` and `halo` are integers only: which rows travel. Plans read them, without torch.

Inside a prepared module a slab is a tensor subclass that carries the image's sizes and shows the image's shape; one
72-byte message a forward tells them. Four autograd functions make every sum happen once: Fetch, Meet, Sum, Collect. A
convolution is linear, so halos are added after the slab is computed where they are thin.

With a tensor axis as well, a process (t, r) holds part t of the weights and slab r of every image:

| what | among whom | by whom |
|---|---|---|
| halos, of the channels that a layer has here | same t | space, around each convolution and pool |
| weight gradients of part t; those of whole layers, t times the same sum | same t | space |
| statistics of batch norm, of the channels here | same t | space |
| partial sums of outputs, gradients of inputs, gathered channels | same r | tensor, on the slab |
| norms of cut gradients (clipping) | same r | tensor, after the slabs' sums |
| replicas' gradients; their own batch statistics | same t and r | as without axes |

A checkpoint is that of the tensor axis: the processes of slab 0 write it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.parallel.space.preparation import collect, refuse_whole, scatter, spatial, whole

__all__ = ["collect", "refuse_whole", "scatter", "spatial", "whole"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, as that needs torch."""
    if name not in __all__:
        raise AttributeError(f"module 'stretto.parallel.space' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("stretto.parallel.space.preparation"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
