"""The axes along which processes share the work, and the position of each process on them. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import shown, whole

INNER = ("tensor", "height", "width")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many replicas share the examples (`data`), and how many processes share each stage (`tensor` x `space`).

    `space` is (height, width). The fourth axis, the pipeline, is as long as the number of workers that hold stages. The
    product of all axes is the number of processes. Raises UsageError for a length that is no whole number from 1 on.

    >>> Mesh(data=2).pipeline(8)
    4
    """

    data: int = 1
    tensor: int = 1
    space: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if not (isinstance(self.space, tuple | list) and len(self.space) == 2):
            raise UsageError(
                f"space={shown(self.space)}: give two numbers, the parts along height and width, such as space=(2, 1)"
            )
        object.__setattr__(self, "space", tuple(self.space))
        for axis, length in (
            ("data", self.data),
            ("tensor", self.tensor),
            *(("space", length) for length in self.space),
        ):
            if not (isinstance(length, int) and not isinstance(length, bool) and length >= 1):
                value = getattr(self, axis)
                raise UsageError(f"{axis}={shown(value)}: the length of an axis is a whole number of at least 1")

    @cached_property
    def inside(self) -> int:
        """The number of processes that share one stage of one replica."""
        return self.tensor * math.prod(self.space)

    @cached_property
    def _hash(self) -> int:
        return hash((self.data, self.tensor, self.space))

    def __hash__(self) -> int:
        return self._hash  # made once: searches for plans look up a lot by their mesh

    def pipeline(self, processes: int) -> int:
        """The number of workers that hold stages. Raises UsageError if the other axes do not divide `processes`."""
        whole("processes", processes, 1)
        others = self.data * self.inside
        if processes % others:
            less, more = processes // others * others, (processes // others + 1) * others
            start = f"{less} or {more}" if less else f"{more}"
            replicas = [count for count in range(1, processes + 1) if processes % (count * self.inside) == 0]
            choose = f", or choose data from {', '.join(map(str, replicas))}" if replicas else ""
            raise UsageError(
                f"{processes} processes for {self}: data x pipeline x tensor x space must be the number of processes; "
                f"start {start}{choose}"
            )
        return processes // others

    def to_json(self) -> dict[str, Any]:
        """The lengths of the axes as a dict, for JSON."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        return f"Mesh(data={self.data}, tensor={self.tensor}, space={self.space})"


@dataclass(frozen=True)
class Placement:
    """A mesh with a pipeline of `workers`: maps replica, worker and part to a rank, and back.

    Axes from the outermost to the innermost: data, pipeline, tensor, height, width. Neighbours on an inner axis have
    neighbouring ranks, as they exchange the most messages. A part is the index of a process among those that share the
    stages of one worker.
    """

    mesh: Mesh
    workers: int

    @property
    def axes(self) -> dict[str, int]:
        """The length of each axis, from the outermost to the innermost."""
        height, width = self.mesh.space
        lengths = (self.mesh.data, self.workers, self.mesh.tensor, height, width)
        return dict(zip(("data", "pipeline", "tensor", "height", "width"), lengths, strict=True))

    @property
    def size(self) -> int:
        """The number of processes."""
        return math.prod(self.axes.values())

    def rank(self, replica: int, worker: int, part: int = 0) -> int:
        """The rank of a part of a worker of a replica."""
        return (replica * self.workers + worker) * self.mesh.inside + part

    def at(self, rank: int) -> tuple[int, int]:
        """The replica and the worker of a rank."""
        return divmod(rank // self.mesh.inside, self.workers)

    def part(self, rank: int) -> int:
        """The part of a rank: its index among the processes that share its stages."""
        return rank % self.mesh.inside

    def replicas_of(self, worker: int, part: int = 0) -> list[int]:
        """The ranks that hold the same part of the same stages, one in each replica."""
        return [*self.replica_range(worker, part)]

    def replica_range(self, worker: int, part: int = 0) -> range:
        """`replicas_of` as a range."""
        return range(self.rank(0, worker, part), self.size, self.workers * self.mesh.inside)

    def workers_of(self, replica: int, part: int = 0) -> list[int]:
        """The ranks of one part of every worker of a replica, in the order of the pipeline."""
        return [self.rank(replica, worker, part) for worker in range(self.workers)]

    def parts_of(self, replica: int, worker: int) -> list[int]:
        """The ranks that share the stages of one worker of a replica."""
        return [*self.part_range(replica, worker)]

    def part_range(self, replica: int, worker: int) -> range:
        """`parts_of` as a range."""
        first = self.rank(replica, worker)
        return range(first, first + self.mesh.inside)

    def slabs_of(self, replica: int, worker: int) -> list[list[int]]:
        """The ranks that share the stages of one worker, by the part of the weights that they hold: slabs of images."""
        return list(map(list, self.slab_ranges(replica, worker)))

    def slab_ranges(self, replica: int, worker: int) -> list[range]:
        """`slabs_of` as ranges."""
        parts, slabs = self.part_range(replica, worker), math.prod(self.mesh.space)
        return [parts[first : first + slabs] for first in range(0, len(parts), slabs)]

    def weights_of(self, replica: int, worker: int) -> list[list[int]]:
        """The ranks that share the stages of one worker, by the slab that they hold: parts of the weights."""
        return list(map(list, self.weight_ranges(replica, worker)))

    def weight_ranges(self, replica: int, worker: int) -> list[range]:
        """`weights_of` as ranges."""
        parts, slabs = self.part_range(replica, worker), math.prod(self.mesh.space)
        return [parts[slab::slabs] for slab in range(slabs)]

    @property
    def inner(self) -> dict[str, int]:
        """The lengths of the axes inside a stage (tensor, height, width) that are longer than 1."""
        return {axis: length for axis, length in self.axes.items() if axis in INNER and length > 1}

    def place(self, rank: int) -> dict[str, int]:
        """The position of a rank along each of the `inner` axes."""
        part = self.part(rank)
        positions: dict[str, int] = {}
        for axis, length in reversed(self.inner.items()):
            part, positions[axis] = divmod(part, length)
        return dict(reversed(positions.items()))

    def describe(self, worker_of: Mapping[int, int]) -> str:
        """The axes and the position of each process as text; `worker_of` is the worker of each stage.

        >>> print(Placement(Mesh(data=2), 2).describe({0: 0, 1: 0, 2: 1}))
        data 2 x pipeline 2 = 4 processes
        process 0: replica 0, worker 0 (stages 0, 1)
        process 1: replica 0, worker 1 (stage 2)
        process 2: replica 1, worker 0 (stages 0, 1)
        process 3: replica 1, worker 1 (stage 2)
        """
        shown = [f"{axis} {length}" for axis, length in self.axes.items() if length > 1 or axis in ("data", "pipeline")]
        lines = [f"{' x '.join(shown)} = {self.size} processes"]
        for rank in range(self.size):
            replica, worker = self.at(rank)
            numbers = [str(stage) for stage, owner in sorted(worker_of.items()) if owner == worker]
            stages = f"stage{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
            part = "".join(f", {axis} {position}" for axis, position in self.place(rank).items())
            lines.append(f"process {rank}: replica {replica}, worker {worker}{part} ({stages})")
        return "\n".join(lines)
