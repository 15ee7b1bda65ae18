"""The processes of this job, and how this one joins them: torchrun, SLURM, or a process group that is there already."""

import contextlib
import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # mypy does not see that it exports them
from torch.distributed.distributed_c10d import PrefixStore, Store

from stretto.errors import UsageError
from stretto.nn.devices import default_backend
from stretto.runtime.failure import WorkerLostError
from stretto.runtime.group_sockets import made_here, refuse_without_room
from stretto.runtime.rendezvous.addresses import Address, answers, connect_to_store
from stretto.runtime.rendezvous.signed_store import VARIABLE, Secret, of_round
from stretto.runtime.serialize import as_tensor, as_text

TIMEOUT = timedelta(minutes=10)
ADDRESS_OF = 0x8915  # SIOCGIFADDR
RECORD = 1024  # bytes of what processes tell each other before they begin


@dataclass(frozen=True, eq=False)
class World:
    """This process among all of them: its rank, how many there are, its number on this machine, and their store.

    The store is a part of `base`, to which `reinitialize` adds others. A `backend` that the user has chosen is kept.
    """

    rank: int
    size: int
    local_rank: int
    store: Store | None
    base: Store | None = None
    origin: Store | None = None  # what it is a part of: torch keeps no reference to a store that is made in Python
    times: int = 0  # how often they have met again
    backend: str | None = None

    def reinitialize(self, timeout: timedelta) -> "World":
        """The same processes, which have parted, together once more; a collective.

        Raises WorkerLostError, naming who has not come in time.
        """
        times = self.times + 1
        assert self.base is not None, "without a store nobody finds the others"
        store = PrefixStore(f"again {times}", self.base)
        hook = sys.excepthook  # torch adds another that names the rank, each time
        try:
            gather(store, self.rank, self.size, timeout.total_seconds())
            initialize(store, self.rank, self.size, self.backend, timeout)
        except RuntimeError as error:
            raise WorkerLostError("worker 0, which holds the store where all meet, is gone") from error
        sys.excepthook = hook
        return replace(self, store=PrefixStore("stretto", store), times=times)

    def group(self, timeout: float) -> dist.ProcessGroup:
        """A new group of all processes, with messages of its own; a collective. `timeout` is in seconds.

        All have their connections when it returns. One that fails then is missed by the others; if it fails while they
        still connect, they wait for it until gloo gives up.
        """
        if self.store is None:
            made = group_of(range(self.size), timeout)
            assert made is not None, "every process is in the group of all"
            return made
        with connecting(self.store, self.rank, self.size, timeout):
            made = group_of(range(self.size), timeout)
            assert made is not None, "every process is in the group of all"
            keys = [f"made/{made.group_name}/{rank}" for rank in range(self.size)]
            self.store.set(keys[self.rank], "")
            self.store.wait(keys, timedelta(seconds=timeout))
        return made


def join(environment: Mapping[str, str] | None = None, timeout: timedelta = TIMEOUT) -> World | None:
    """This process's place in the job; None where it is alone. Joins the others if nobody has done it before.

    It waits for them for so long. Raises UsageError if the variables that the launcher sets do not fit together.
    """
    if not dist.is_available():
        return None
    if dist.is_initialized():
        if dist.get_world_size() == 1:
            return None
        store = default_store()
        return World(
            dist.get_rank(),
            dist.get_world_size(),
            local_rank(dict(os.environ)),
            store,
            base=store,
            backend=dist.distributed_c10d.get_backend_config(),
        )
    given = variables(environment)
    size = whole("WORLD_SIZE", given)
    if size in (None, 1):
        return None
    if whole("RANK", given) is None:
        raise UsageError(f"WORLD_SIZE={size}, but RANK is not set: start it with torchrun --nproc-per-node {size}")
    os.environ.update({key: given[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key in given})
    choose_interface(given)
    try:
        return entered(given, timeout)
    except WorkerLostError as error:
        if given.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # else a launcher has started all
            error.add_note(advice(given))
        raise


def entered(given: Mapping[str, str], timeout: timedelta) -> World:
    """The world of the processes that a launcher's variables name. Raises WorkerLostError if some do not come."""
    origin, rank, number = rendezvous(given, timeout)
    # torchrun's store outlives the processes that it starts again, and still has the addresses of the former ones.
    # Machines do not count restarts alike: there a launcher has to give each attempt a store of its own.
    attempt = given.get("TORCHELASTIC_RESTART_COUNT", "0") if is_one_machine(given) else "any"
    store = PrefixStore(f"attempt {attempt}", origin)
    gather(store, rank, number, timeout.total_seconds())
    initialize(store, rank, number, timeout=timeout)
    return World(rank, number, local_rank(given), PrefixStore("stretto", store), base=store, origin=origin)


def initialize(base: Store, rank: int, size: int, backend: str | None = None, timeout: timedelta = TIMEOUT) -> None:
    """Make torch's default group. Without a backend it has several: a user's collectives on GPUs work too.

    Raises WorkerLostError if somebody has not come in time.
    """
    refuse_without_room(size)
    with connecting(base, rank, size, timeout.total_seconds()), made_here():
        store = PrefixStore("default", base)
        backend = backend or default_backend()
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def gather(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all processes have come to the store. Raises WorkerLostError, naming who has not in time.

    From then on nobody connects to the store, whose connections would be taken for those of a process group.
    """
    keys, until = [f"comes/{each}" for each in range(size)], time.monotonic() + timeout
    store.set(keys[rank], "")
    while not store.check(keys):
        if time.monotonic() > until:
            raise late([each for each, key in enumerate(keys) if not store.check([key])], timeout)
        time.sleep(0.02)


def late(workers: Sequence[int], timeout: float) -> WorkerLostError:
    names = ", ".join(map(str, workers))
    who = f"workers {names} have" if workers[1:] else f"worker {names} has" if workers else "another worker has"
    return WorkerLostError(f"{who} not connected within {timeout:g} s: not started, hanging or gone")


@contextlib.contextmanager
def connecting(store: Store, rank: int, size: int, timeout: float) -> Iterator[None]:
    """While all processes connect with each other. Raises WorkerLostError, naming who has not begun to in time."""
    turn = store.add(f"connects/{rank}", 1)
    try:
        yield
    except RuntimeError as error:
        behind = [each for each in range(size) if store.add(f"connects/{each}", 0) < turn]
        raise late(behind, timeout) from error


def advice(given: Mapping[str, str]) -> str:
    size = given["WORLD_SIZE"]
    if given.get("SLURM_STEP_NUM_TASKS", "1") == size:
        return (
            f"SLURM_STEP_NUM_TASKS={size}: this step has {size} tasks, which all have to run the script: start it with "
            "srun; for this process alone, as in an interactive step, set WORLD_SIZE=1"
        )
    return f"WORLD_SIZE={size}: start {size} processes, each with a RANK of its own; for this one alone leave it out"


def rendezvous(given: Mapping[str, str], timeout: timedelta) -> tuple[Store, int, int]:
    """The store where the processes of this job meet, this one's rank, and how many they are.

    Where the job has a secret, only what is signed with it counts. Nobody waits here for all others: who does not come
    is missed later, by name. Raises WorkerLostError if the store is not reached in time.
    """
    text = given.get(VARIABLE, "").strip()
    of_agent = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if missing:
        raise UsageError(f"WORLD_SIZE={given['WORLD_SIZE']}, but {' and '.join(missing)} is not set: use torchrun")
    address = Address(given["MASTER_ADDR"], whole("MASTER_PORT", given) or 0)
    rank, number = int(given["RANK"]), int(given["WORLD_SIZE"])
    if text and of_agent:
        store: Store = connect_to_store(address, TIMEOUT)
    else:
        first, until = rank == 0 and not of_agent, time.monotonic() + timeout.total_seconds()
        while not (first or answers(address)):  # torch would go on for longer
            if time.monotonic() > until:
                raise WorkerLostError(
                    f"worker 0 has not been reached at {address} within {timeout.total_seconds():g} s: not started "
                    "there, or gone"
                )
            time.sleep(0.1)
        store = TCPStore(*address, is_master=first, timeout=TIMEOUT, wait_for_workers=False, multi_tenant=True)
    store.set_timeout(TIMEOUT)
    return of_round(store, Secret(text), given.get("TORCHELASTIC_RUN_ID", "none")) if text else store, rank, number


def place_in_job(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """This process's rank among those that a launcher has started, and how many they are; (0, 1) where it is alone."""
    given = variables(environment)
    return whole("RANK", given) or 0, whole("WORLD_SIZE", given) or 1


def take_place(placement: Sequence[int]) -> None:
    """Give this process the rank at which `placement` lists it as a worker; to be called once, before it joins.

    Workers are numbered in the order of the launcher's ranks; where only some of a cluster's are listed, the launcher
    has started these. Raises UsageError if it has started another number of them, or if ranks cannot be changed.
    """
    given = variables(None)
    rank, size = place_in_job(given)
    if not placement or size == 1:
        return
    listed = ",".join(map(str, placement))
    if len(placement) != size:
        raise UsageError(f"placement={listed}, but {size} processes have been started: start {len(placement)}")
    near = is_one_machine(given) or given.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
    if not near and given.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and placement[0] != min(placement):
        raise UsageError(
            f"placement={listed}: process 0 has to run where this launcher expects rank 0, as the others meet there. "
            "Start the processes in the order of the placement and leave it out, or use torchrun"
        )
    worker = sorted(placement)[rank]
    local = {"LOCAL_RANK": str(worker)} if is_one_machine(given) else {}  # whose accelerator it takes
    os.environ.update({**given, "RANK": str(list(placement).index(worker)), **local})


def variables(environment: Mapping[str, str] | None) -> dict[str, str]:
    """What the launcher has set, by the names of torchrun; by default this process's own environment."""
    given = dict(os.environ) if environment is None else dict(environment)
    return given if "WORLD_SIZE" in given else from_slurm(given)


def from_slurm(given: dict[str, str]) -> dict[str, str]:
    size = given.get("SLURM_STEP_NUM_TASKS", "1")
    if size in ("", "1"):
        return given
    hosts = given.get("SLURM_STEP_NODELIST", given.get("SLURM_NODELIST", "localhost"))
    return {
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(20000 + int(given.get("SLURM_JOB_ID", "0")) % 20000),
        **given,
        "WORLD_SIZE": size,
        "RANK": given["SLURM_PROCID"],
        "LOCAL_RANK": given.get("SLURM_LOCALID", "0"),
    }


def first_host(hosts: str) -> str:
    """The first of SLURM's list of hosts.

    >>> first_host("gpu[07-09,12],login1")
    'gpu07'
    """
    head = re.split(r",(?![^\[]*\])", hosts)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", head)


def choose_interface(given: Mapping[str, str]) -> None:
    """Listen on the loopback interface only where all processes are on this machine, else where rank 0's is reached.

    (Left to itself gloo takes the one that this machine's name stands for, which often nobody else can reach.)
    """
    address = given.get("MASTER_ADDR", "")
    near = is_one_machine(given) or address in ("127.0.0.1", "localhost")
    chosen = interface_towards("127.0.0.1" if near else address)
    if chosen is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)


def is_one_machine(given: Mapping[str, str]) -> bool:
    """Whether the launcher has started all processes on this machine, as far as it says."""
    return given.get("LOCAL_WORLD_SIZE") == given.get("WORLD_SIZE")


def interface_towards(host: str) -> str | None:
    """The name of the network interface that leads to a host; None where it cannot be told."""
    try:
        from fcntl import ioctl  # not on every system

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            mine = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has no address
                    if ioctl(probe.fileno(), ADDRESS_OF, struct.pack("256s", name.encode()[:15]))[20:24] == mine:
                        return name
    except (ImportError, OSError):
        return None
    return None


def whole(variable: str, given: Mapping[str, str]) -> int | None:
    """A launcher's variable as a number; None where it is not set."""
    value = given.get(variable, "")
    if not value:
        return None
    if not value.isdigit():
        raise UsageError(f"{variable}={value!r}: a launcher sets it to a whole number")
    return int(value)


def local_rank(given: Mapping[str, str]) -> int:
    return whole("LOCAL_RANK", given) or 0


def machines_of(ranks: Iterable[int], environment: Mapping[str, str] | None = None) -> int:
    """How many machines some processes are on, as far as the launcher says; 1 where it does not."""
    given = dict(os.environ) if environment is None else environment
    each = whole("LOCAL_WORLD_SIZE", given)
    return len({rank // each for rank in ranks}) if each else 1


def default_store() -> Store | None:
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else PrefixStore("stretto", find())


def group_of(ranks: Iterable[int], timeout: float, backend: str | None = "gloo") -> dist.ProcessGroup | None:
    """A new group of some processes, None in the others: a collective of all processes. `timeout` is in seconds.

    Without a backend it has those of the default group.
    """
    with made_here():
        made = dist.new_group(sorted(ranks), backend=backend, timeout=timedelta(seconds=timeout))
    return made if isinstance(made, dist.ProcessGroup) else None


def all_gather_bytes(group: dist.ProcessGroup, mine: bytes) -> list[bytes]:
    """The bytes of every process of a group, in the order of ranks, each as many; a collective."""
    own = as_tensor(mine)
    told = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, own, group=group)
    return [as_text(each) for each in told]


def broadcast(group: dist.ProcessGroup, mine: bytes, root: int = 0) -> bytes:
    """The bytes of the group's process `root` on all of them; a collective."""
    length = torch.tensor([len(mine)])
    dist.broadcast(length, group_src=root, group=group)
    text = as_tensor(mine) if dist.get_rank(group) == root else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(text, group_src=root, group=group)
    return as_text(text)


def agree(group: dist.ProcessGroup, mine: Mapping[str, Any]) -> None:
    """Raise UsageError, on every process, if they do not all say the same about the training that is to begin."""
    text = json.dumps(mine, sort_keys=True).encode()
    first, *others = (each.rstrip(b"\0") for each in all_gather_bytes(group, text[:RECORD].ljust(RECORD, b"\0")))
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            raise UsageError(
                f"rank {rank} trains something else than rank 0: {difference(first, theirs)}. All processes have to "
                "run the same script, with the same versions of stretto and torch"
            )


def compare(group: dist.ProcessGroup, mine: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise UsageError, on every process, if two say different things; a collective.

    The message is "rank 2 `what` than rank 1", for the first rank that differs, with the key and both values. None says
    nothing of its key. A description has at most RECORD bytes as JSON.
    """
    text = json.dumps(mine).encode()
    assert len(text) <= RECORD, f"{len(text)} bytes are too many to compare"
    told = [json.loads(each.rstrip(b"\0")) for each in all_gather_bytes(group, text.ljust(RECORD, b"\0"))]
    first: dict[str, int] = {}  # the first rank that says something of a key
    for rank, theirs in enumerate(told):
        said = [key for key, value in theirs.items() if value is not None]
        differ = [key for key in said if told[first.setdefault(key, rank)][key] != theirs[key]]
        if differ:
            other = min(first[key] for key in differ)
            differs = "; ".join(
                f"{key} is {told[other][key]!r} on rank {other} and {theirs[key]!r} there"
                for key in sorted(differ)
                if first[key] == other
            )
            raise UsageError(f"rank {rank} {what} than rank {other}: {differs}. {remedy}")


def difference(first: bytes, other: bytes) -> str:
    try:
        one, two = json.loads(first), json.loads(other)
    except json.JSONDecodeError:  # cut off at RECORD
        return f"{first[-80:]!r} and {other[-80:]!r}"
    keys = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    return "; ".join(f"{key} is {one.get(key)!r} on rank 0 and {two.get(key)!r} there" for key in keys)
