"""A backward sees the weights its forward saw: weight stashing (PipeDream, Narayanan et al. 2019, section 3.3)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from stretto.nn.batch import Named
from stretto.nn.parameter_hooks import with_hooks_of
from stretto.weights import saved_tensor_check
from stretto.weights.weights import Weights, unwritten
from stretto.weights.written_elsewhere import step_elsewhere


@dataclass(slots=True)
class Version:
    """Leaves that share storage with the parameters until the next update, and how many graphs hold them.

    A forward that will be recomputed counts as a graph.
    """

    leaves: dict[str, nn.Parameter]
    graphs: int = 0


class Stash(Weights):
    """Weights are kept at an update only while a graph still holds them.

    A forward runs on leaves of its own (`functional_call`), so a graph never saves the parameters the optimizer
    changes. In an update the parameters move to fresh storage and the leaves keep the old one. Re-binding
    `p.data` alone would be silently wrong for convolutions and norms: their backward reads the parameter again.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._standing: Version | None = None
        self._checked = False  # a checkpoint in the module would recompute on the parameters, not on the leaves

    def forward(self, inputs: Sequence[Tensor], behind: int = 0) -> tuple[Any, Any]:
        """Run the module on the leaves of the current version."""
        assert behind == 0, f"weights {behind} updates back are asked for; a stash keeps those of forwards only"
        return self.run_on(self.standing(), inputs)

    def standing(self) -> Version:
        """The version with the current weights; all forwards until the next update share it."""
        if self._standing is None:
            self._standing = Version(
                {name: with_hooks_of(p, nn.Parameter(p.data)) for name, p in self._parameters.items()}
            )
        return self._standing

    def run_on(self, version: Version, inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        """Run the module on a version's leaves; the graph holds the version until `collect`.

        The first call raises UsageError for a module that recomputes in its backward.
        """
        version.graphs += 1
        if self._checked:
            return self._call(version, inputs), version
        output = saved_tensor_check.call_refusing_checkpoints(self.module, lambda: self._call(version, inputs))
        self._checked = True
        return output, version

    def recompute(self, inputs: Sequence[Tensor], version: Version) -> tuple[Any, Any]:
        """Run the module again on the leaves that its forward saw."""
        return self._call(version, inputs), version

    def _call(self, version: Version, inputs: Sequence[Tensor]) -> Any:
        with unwritten(version.leaves):
            if isinstance(inputs, Named):
                given = dict(zip(inputs.names, inputs, strict=True))
                return functional_call(self.module, dict(version.leaves), (), given)
            return functional_call(self.module, dict(version.leaves), tuple(inputs))

    def leaves(self, version: Version) -> list[Tensor]:
        """The version's leaves."""
        return list(version.leaves.values())

    def collect(self, version: Version) -> None:
        """Move the leaves' gradients to the parameters; forget a version that no graph holds."""
        version.graphs -= 1
        for name, leaf in version.leaves.items():
            parameter = self._parameters[name]
            if leaf.grad is not None:
                parameter.grad = leaf.grad if parameter.grad is None else parameter.grad.add_(leaf.grad)
                leaf.grad = None
        if version.graphs == 0 and version is self._standing:
            self._standing = None

    def forget(self) -> None:
        """Drop the current version: the next forward reads the parameters."""
        self._standing = None

    def update(self, step: Callable[[], object]) -> None:
        """Leave the storage to the graphs that hold it, if any, and let `step` write the new weights elsewhere."""
        standing, self._standing = self._standing, None
        if standing is None:
            step()
            return
        shared = [
            parameter
            for name, parameter in self._parameters.items()
            if standing.leaves[name].data_ptr() == parameter.data_ptr()
        ]
        step_elsewhere(shared, step)

    def forward_values(self, version: Version) -> Mapping[str, Tensor]:
        """The version's leaves, by the parameter's name."""
        return version.leaves

    def backward_values(self, version: Version) -> Mapping[str, Tensor]:
        """The version's leaves, by the parameter's name."""
        return version.leaves

    def held(self, versions: Iterable[Version]) -> Iterator[Tensor]:
        """The leaves of these versions and of the current one."""
        for version in (*versions, self._standing):
            if version is not None:
                yield from version.leaves.values()
