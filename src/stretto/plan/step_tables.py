"""What steps of the optimizer take beside their passes, for every way to cut layers: cures, products of matrices."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from stretto.cost.attained import BYTES
from stretto.cost.cluster import Link
from stretto.cost.cure_costs import matrix_bytes
from stretto.cost.layer_table import LayerCost
from stretto.cost.mixed_precision import step_factor
from stretto.cost.stage_prediction import Machine, cure_seconds, matrix_seconds
from stretto.methods.cure import StepCure
from stretto.optimizers import Stepping, optimizer_of
from stretto.plan.places import DeviceKind, gathering
from stretto.plan.problem import LayerForm, Problem
from stretto.plan.range_tables import Table, range_sums

Distinct = Callable[[LayerForm], tuple[list[LayerCost], NDArray[np.intp]]]


def machines_of(
    problem: Problem, kinds: Sequence[DeviceKind], dtype: str, *, on_chip: bool = False
) -> list[Machine]:  # fmt: skip
    """The machines of kinds of devices, each once."""
    found = [(problem.cluster.devices_by_kind[kind.worker], kind.crowded) for kind in dict.fromkeys(kinds)]
    return [Machine(device.on_chip if on_chip else device, dtype, crowded) for device, crowded in found]


def slowest(kinds: Sequence[DeviceKind]) -> float:
    """How many times as long the slowest of some kinds of devices takes as its kind on average."""
    return max(kind.slowest for kind in kinds)


class StepTables:
    """Steps of a problem's optimizer; `distinct` gives the layers of a form that differ, and which of them each is."""

    def __init__(self, problem: Problem, dtype: str, distinct: Distinct) -> None:
        self.problem = problem
        self.dtype = dtype
        self.distinct = distinct
        self.cure = lru_cache(maxsize=256)(self._cure)
        self.orthogonalising = lru_cache(maxsize=256)(self._orthogonalising)

    @cached_property
    def stepping(self) -> Stepping:
        """How the optimizer steps: with float32 masters its passes over numbers take longer."""
        problem = self.problem
        if not problem.masters:
            return Stepping(problem.optimizer)
        longer = step_factor(problem.optimizer, self.dtype) if problem.weight_products else 2.0
        return Stepping(problem.optimizer, longer, masters=True)

    def _cure(self, cure: StepCure, kinds: tuple[DeviceKind, ...], form: LayerForm) -> tuple[Table, Table]:
        # Seconds that a cure adds to a step of the layers [i, j), on the slowest of some kinds of devices, and bytes
        # that it keeps of their matrices.
        def seconds(layer: LayerCost, machine: Machine) -> float:
            return cure_seconds(cure, layer, machine, self.stepping).mean(cure)

        return self._longest(seconds, kinds, form), self._sums(
            lambda layer: matrix_bytes(cure, layer, self.stepping), form
        )

    def of_shares(
        self, update: Table, kinds: tuple[DeviceKind, ...], form: LayerForm, replicas: Sequence[Link], data: int
    ) -> Table:
        """Seconds of an update in which each of `data` replicas steps its shares of weights.

        Muon gathers the step of each hidden matrix, and orthogonalises it in every replica.
        """
        if optimizer_of(self.problem.optimizer).on_matrices != "orthogonalise":
            return update / data
        products, num_bytes = self.orthogonalising(kinds, form)
        products = np.minimum(products, update)
        return (update - products) / data + products + gathering(replicas, data, num_bytes)

    def _orthogonalising(self, kinds: tuple[DeviceKind, ...], form: LayerForm) -> tuple[Table, Table]:
        # Seconds of Muon's products for the layers [i, j), and bytes of their hidden matrices.
        chosen = optimizer_of(self.problem.optimizer)
        item = 4 if self.problem.masters else BYTES.get(self.dtype, 4)

        def seconds(layer: LayerCost, machine: Machine) -> float:
            return matrix_seconds(layer, chosen, machine)

        return self._longest(seconds, kinds, form), self._sums(lambda layer: item * layer.matrices.hidden, form)

    def _longest(self, seconds: Callable[..., float], kinds: tuple[DeviceKind, ...], form: LayerForm) -> Table:
        # The sums of a layer's seconds over the layers [i, j), on the slowest of some kinds of devices.
        tables = [
            self._sums(partial(seconds, machine=machine), form)
            for machine in machines_of(self.problem, kinds, self.dtype)
        ]
        longest: Table = slowest(kinds) * np.maximum.reduce(tables)
        return longest

    def _sums(self, value: Callable[[LayerCost], float], form: LayerForm) -> Table:
        # The sums of a layer's values over the layers [i, j).
        layers, indices = self.distinct(form)
        return range_sums(np.array([value(layer) for layer in layers])[indices])
