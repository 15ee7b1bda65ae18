"""Several processes that share the stages of one worker: their weights (tensor) or the images (height, width)."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from stretto.mesh import Placement
from stretto.nn.buckets import align, tensors_of
from stretto.optim import Masters
from stretto.optim.traits import refuse_parts
from stretto.parallel.operator import gather, norms, tensor
from stretto.parallel.space import collect, refuse_whole, scatter, spatial, whole
from stretto.runtime.failure import PeerLostError
from stretto.stage.intra_stage import StageSharing
from stretto.stage.stage import Norms, own_norms


def share_stages(
    placement: Placement, rank: int, device: torch.device, group_of: Callable[..., dist.ProcessGroup | None]
) -> StageSharing:
    """How this process shares its stages. A collective of all processes; `group_of` gives it groups."""
    axes = placement.inner
    if not axes:
        return StageSharing()
    groups: dict[str, dist.ProcessGroup] = {}
    for replica in range(placement.mesh.data):
        for worker in range(placement.workers):
            ranks = torch.tensor(placement.parts_of(replica, worker)).reshape(list(axes.values()))
            for dim, axis in enumerate(axes):
                for line in ranks.movedim(dim, -1).reshape(-1, axes[axis]).tolist():
                    made = group_of(line, backend=None)
                    if made is not None:
                        groups[axis] = made
    mine = placement.parts_of(*placement.at(rank))
    mesh = DeviceMesh.from_group(
        list(groups.values()),
        device.type,
        mesh=torch.tensor(mine).reshape(list(axes.values())),
        mesh_dim_names=tuple(axes),
    )
    others = [other for other in mine if other != rank]
    weights, images = "tensor" in axes, len(axes) > ("tensor" in axes)
    kind = SharedWeightsAndImages if weights and images else SharedWeights if weights else SharedImages
    return kind(mesh, placement.place(rank), others)


class SharedWorker(StageSharing):
    """What is the same for all: a mesh of the axes inside a stage, and this process's place on them."""

    def __init__(self, mesh: DeviceMesh, place: Mapping[str, int], others: Sequence[int]) -> None:
        self._mesh = mesh
        self._place = place
        self._others = others

    @contextmanager
    def working(self) -> Iterator[None]:
        """An error of torch.distributed means that one of the others is gone."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise PeerLostError(self._others[0], error, self._others) from error


class SharedWeights(SharedWorker):
    """Each process has a part of the weights, and every activation at a stage's border whole."""

    def __init__(self, mesh: DeviceMesh, place: Mapping[str, int], others: Sequence[int]) -> None:
        super().__init__(mesh, place, others)
        self._tensor_group = mesh.get_group("tensor")
        self.parts, self.part = mesh["tensor"].size(), place["tensor"]

    def prepare(
        self, module: nn.Module, *, first: bool = False, last: bool = False, tied: Collection[Tensor] = ()
    ) -> None:
        """Cut its weights, but for tied ones: they stay the parameters that they are on other stages."""
        whole = {
            path: "replicate"
            for path, layer in module.named_modules()
            if any(weight in tied for weight in layer.parameters(recurse=False))
        }
        tensor(module, self._mesh, plan=whole, parameters="local")

    def prepare_head(self, head: nn.Module) -> None:
        align(tensors_of([head]), self._tensor_group)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        with self.working():
            return gather(module)

    def norms(self, modules: Sequence[nn.Module], masters: Masters, here: Norms = own_norms) -> Norms:
        return norms(modules, self._mesh, masters.of, here)

    def check(self, optimizer: torch.optim.Optimizer, stage: int) -> None:
        """LARS and LAMB compare a layer's weights with its update; Muon and SOAP need whole matrices."""
        refuse_parts(optimizer, f"tensor={self.parts}", stage)


class SharedImages(SharedWorker):
    """Each process has all weights, and a part of every image's rows and columns."""

    def __init__(self, mesh: DeviceMesh, place: Mapping[str, int], others: Sequence[int]) -> None:
        space = tuple(axis for axis in place if axis != "tensor")
        super().__init__(mesh[space], place, others)
        self.writes = not any(place[axis] for axis in space)

    def prepare(
        self, module: nn.Module, *, first: bool = False, last: bool = False, tied: Collection[Tensor] = ()
    ) -> None:
        """Let it work on slabs; hooks cut what comes in first, and put together what goes out last."""
        for group in self._mesh.get_all_groups():
            align(tensors_of([module]), group)
        if first:
            module.register_forward_pre_hook(self._cut, with_kwargs=True)
        module.register_forward_hook(whole if last else refuse_whole)
        spatial(module, self._mesh)

    def prepare_head(self, head: nn.Module) -> None:
        self.prepare(head, last=True)

    def _cut(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def cut(value: Any) -> Any:
            return scatter(value, self._mesh) if isinstance(value, Tensor) and value.ndim > 2 else value

        return tree_map(cut, args), tree_map(cut, kwargs)

    def whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(collect(x, self._mesh) if x.ndim > 2 else x for x in outputs)


class SharedWeightsAndImages(SharedWeights):
    """Each process has a part of the weights, and a part of every image's rows and columns.

    Processes with the same rows exchange channels (tensor); those with the same part of the weights exchange rows and
    sum that part's gradients (height, width).
    """

    def __init__(self, mesh: DeviceMesh, place: Mapping[str, int], others: Sequence[int]) -> None:
        super().__init__(mesh, place, others)
        self._images = SharedImages(mesh, place, others)
        self.writes = self._images.writes

    def prepare(
        self, module: nn.Module, *, first: bool = False, last: bool = False, tied: Collection[Tensor] = ()
    ) -> None:
        """Cut its weights, then let it work on slabs: that makes the slabs of a part begin with the same weights."""
        super().prepare(module, tied=tied)
        self._images.prepare(module, first=first, last=last)

    def prepare_head(self, head: nn.Module) -> None:
        super().prepare_head(head)
        self._images.prepare_head(head)

    def whole(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._images.whole(outputs)
