"""The axes along which processes share the work, and which process stands where on them. No torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stretto.errors import UsageError
from stretto.options.checks import shown, whole

INNER = ("tensor", "height", "width")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many processes share the examples (`data`), and how many share the work of each stage (`tensor`, `space`).

    `Mesh(data=2)`. The fourth axis, the pipeline, is as long as the number of workers that hold stages. All axes
    multiply to the number of processes. Raises UsageError for lengths that cannot be.
    """

    data: int = 1
    tensor: int = 1
    space: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if not (isinstance(self.space, tuple | list) and len(self.space) == 2):
            raise UsageError(
                f"space={shown(self.space)}: give two numbers, the slabs of height and width: space=(2, 1)"
            )
        object.__setattr__(self, "space", tuple(self.space))
        for axis, length in (("data", self.data), ("tensor", self.tensor), *(("space", each) for each in self.space)):
            if not (isinstance(length, int) and not isinstance(length, bool) and length >= 1):
                value = getattr(self, axis)
                raise UsageError(f"{axis}={shown(value)}: the length of an axis is a whole number of at least 1")

    @property
    def inside(self) -> int:
        """How many processes share one stage of one replica."""
        return self.tensor * math.prod(self.space)

    def pipeline(self, processes: int) -> int:
        """How many workers hold stages. Raises UsageError if the axes do not multiply to `processes`."""
        whole("processes", processes, 1)
        others = self.data * self.inside
        if processes % others:
            less, more = processes // others * others, (processes // others + 1) * others
            start = f"{less} or {more}" if less else f"{more}"
            fitting = [each for each in range(1, processes + 1) if processes % (each * self.inside) == 0]
            choose = f", or choose data from {', '.join(map(str, fitting))}" if fitting else ""
            raise UsageError(
                f"{processes} processes for {self}: data x pipeline x tensor x space must be the number of processes; "
                f"start {start}{choose}"
            )
        return processes // others

    def to_json(self) -> dict[str, Any]:
        """The lengths of its axes."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        return f"Mesh(data={self.data}, tensor={self.tensor}, space={self.space})"


@dataclass(frozen=True)
class Placement:
    """A mesh with its pipeline of `workers`: the axes in their order, and the process of each place.

    Axes from the outermost to the innermost: data, pipeline, tensor, height, width. Neighbours on an inner axis have
    neighbouring ranks: what talks most often stands nearest.
    """

    mesh: Mesh
    workers: int

    @property
    def axes(self) -> dict[str, int]:
        """The axes in their order, with their lengths."""
        height, width = self.mesh.space
        lengths = (self.mesh.data, self.workers, self.mesh.tensor, height, width)
        return dict(zip(("data", "pipeline", "tensor", "height", "width"), lengths, strict=True))

    @property
    def size(self) -> int:
        """How many processes there are."""
        return math.prod(self.axes.values())

    def rank(self, replica: int, worker: int, part: int = 0) -> int:
        """The process of a worker of a replica: the first one, or another `part`, if several share its stages."""
        return (replica * self.workers + worker) * self.mesh.inside + part

    def at(self, rank: int) -> tuple[int, int]:
        """The replica and the worker of a process."""
        return divmod(rank // self.mesh.inside, self.workers)

    def part(self, rank: int) -> int:
        """Which of the processes that share its stages a process is."""
        return rank % self.mesh.inside

    def replicas_of(self, worker: int, part: int = 0) -> list[int]:
        """The processes that hold the same part of the same stages in all replicas."""
        return [self.rank(replica, worker, part) for replica in range(self.mesh.data)]

    def workers_of(self, replica: int, part: int = 0) -> list[int]:
        """The processes of one replica, in the order of the pipeline; of those that share stages, one of each."""
        return [self.rank(replica, worker, part) for worker in range(self.workers)]

    def parts_of(self, replica: int, worker: int) -> list[int]:
        """The processes that share the stages of a worker of a replica."""
        return [self.rank(replica, worker, part) for part in range(self.mesh.inside)]

    @property
    def inner(self) -> dict[str, int]:
        """The axes inside a stage that have more than one process."""
        return {axis: length for axis, length in self.axes.items() if axis in INNER and length > 1}

    def place(self, rank: int) -> dict[str, int]:
        """Where a process stands among those that share its stages, along each axis of more than one."""
        part = self.part(rank)
        found: dict[str, int] = {}
        for axis, length in reversed(self.inner.items()):
            part, found[axis] = divmod(part, length)
        return dict(reversed(found.items()))

    def describe(self, worker_of: Mapping[int, int]) -> str:
        """The order of axes, and which process is where; `worker_of` is the worker of each stage.

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
            own = [str(stage) for stage, home in sorted(worker_of.items()) if home == worker]
            stages = f"stage{'s' * (len(own) > 1)} {', '.join(own)}"
            part = "".join(f", {axis} {at}" for axis, at in self.place(rank).items())
            lines.append(f"process {rank}: replica {replica}, worker {worker}{part} ({stages})")
        return "\n".join(lines)
