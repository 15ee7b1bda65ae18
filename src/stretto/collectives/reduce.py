"""All-reduce with an algorithm of one's choice, on point-to-point messages."""

import os
from functools import lru_cache
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.collectives.algorithms import ALGORITHMS, NESTED, plan
from stretto.collectives.calibration import NOMINAL, Calibration, cheapest
from stretto.collectives.calls import Program, lower
from stretto.collectives.execute import execute
from stretto.errors import StrettoError, UsageError
from stretto.options.checks import of_kind, one_of, refuse, whole

AUTO = "auto"
KNOWN = (*ALGORITHMS, AUTO)
PIECE = 1 << 20  # bytes of a long message that travel at a time
AHEAD = 2  # addends that are received ahead
OWN_TAGS = 1 << 30  # tags from here on: a user's own messages have small ones


class CollectiveError(StrettoError):
    """Processes that reduce together lost each other, or do not reduce the same."""


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "ring",
    *,
    per_node: int | None = None,
    calibration: Calibration | None = None,
) -> Tensor:
    """Sum a CPU tensor over the processes of a group, in place; return it. The same on all of them, to the last bit.

    `algorithm`: single-master, parameter-server, ring, recursive-doubling, rabenseifner, double-tree, hierarchical
    (with `per_node` consecutive ranks a node; by default as many as the launcher says for a group of all processes,
    else the divisor next to the square root), or auto: what `calibration` (`Calibration.read(file)`) found fastest for
    this number of bytes, and without one what the closed forms say of processes on one machine.

    All processes have to call it with as many elements of the same type and the same algorithm, as with torch's. Where
    they do not, messages do not match: nothing wrong is added, and whoever waits raises CollectiveError, with what it
    wanted, when the group's timeout is over. In a group one call at a time; in several groups at the same time.

    Raises UsageError for anything but a dense CPU tensor of numbers, and for an unknown algorithm.
    """
    group = member_of(group)
    check(tensor)
    one_of("algorithm", algorithm, KNOWN)
    if per_node is not None:
        whole("per_node", per_node, 1)
    if calibration is not None:
        of_kind("calibration", calibration, Calibration, "Calibration.read(file), or None")
    rank, size, length, dtype = group.rank(), group.size(), tensor.numel(), tensor.dtype
    if algorithm == AUTO:
        algorithm = chosen(calibration, size, length * dtype.itemsize)
        per_node = per_node if algorithm == NESTED else None
    if algorithm == NESTED and per_node is None:
        per_node = node_of(group, calibration)
    program, tag = program_of(algorithm, rank, size, length, dtype, per_node)
    flat = tensor.detach().contiguous().view(-1)
    try:
        execute(program, flat, group, tag)
    except RuntimeError as error:
        raise CollectiveError(
            f"all_reduce of {length} elements of {dtype} by {algorithm} failed on rank {rank} of {size}: {error}. "
            "Either a process is gone, or they do not all reduce as many elements of one type by one algorithm"
        ) from error
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def member_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all processes. Raises UsageError if this process is in none."""
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group, under torchrun")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup):
        raise UsageError(f"rank {dist.get_rank()} is not in the group: let only its members call all_reduce")
    return found


def check(tensor: Tensor) -> None:
    """Raise UsageError for a tensor that cannot be summed here."""
    if not isinstance(tensor, Tensor):
        refuse("tensor", tensor, "a tensor; it is summed in place")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise UsageError(f"a {tensor.layout} tensor on {tensor.device}: only dense ones on the CPU travel over gloo")
    if tensor.dtype == torch.bool:
        raise UsageError("a tensor of torch.bool has no sum: convert it to a type of numbers")


def chosen(calibration: Calibration | None, size: int, num_bytes: int) -> str:
    """What `auto` stands for."""
    return cheapest(NOMINAL, size, num_bytes) if calibration is None else calibration.fastest(size, num_bytes)


def node_of(group: dist.ProcessGroup, calibration: Calibration | None) -> int | None:
    """How many ranks are a node: as was calibrated, else as the launcher says; None if neither fits."""
    if calibration is not None and calibration.workers == group.size():
        return calibration.per_node
    return processes_of_a_node(group.size()) if group is dist.group.WORLD else None


@lru_cache(maxsize=8)
def processes_of_a_node(size: int) -> int | None:
    """How many processes the launcher has started on each machine, if it says so and all have as many."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    count = int(said) if said.isdigit() else 0
    return count if 0 < count <= size and size % count == 0 else None


@lru_cache(maxsize=256)
def program_of(
    algorithm: str, rank: int, size: int, length: int, dtype: torch.dtype, per_node: int | None
) -> tuple[Program, int]:
    """The calls of one process and the tag of their messages, which tells different reductions apart."""
    program = lower(plan(algorithm, rank, size, length, per_node=per_node), max(1, PIECE // dtype.itemsize), AHEAD)
    return program, OWN_TAGS | crc32(f"{algorithm} {per_node} {length} {dtype}".encode()) % OWN_TAGS
