"""Everything that Stretto knows of devices: no other file names a kind of device ("cuda", "mps").

Functions that torch has for every accelerator come from `torch.accelerator`, those for one kind from
`torch.get_device_module`. On the CPU no function touches an accelerator.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import shown

CPU = torch.device("cpu")
EXAMPLES = "'cpu' or 'cuda:1'"  # for messages
WITHOUT_FLOAT64 = ("mps",)  # "auto" skips these kinds: losses are averaged in float64
HOST = ("cpu", "meta")  # kinds that run synchronously, and have no random generator beside the CPU's
SHARED_MEMORY = (*HOST, "mps")  # kinds that read the host's memory, which need not be pinned
SPECIFIC_METHODS = ("cpu", "cuda")  # methods of torch.Tensor that move it to a kind of device
SPECIFIC_ATTRIBUTES = ("is_cuda", "is_cpu")  # attributes of torch.Tensor that tell its kind of device


def accelerator() -> str | None:
    """The kind of accelerator that "auto" takes, such as "cuda"; None if "auto" takes the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type in WITHOUT_FLOAT64 else device.type


def pick_device(device: str | torch.device) -> torch.device:
    """The torch.device of a name; "auto" is the accelerator or the CPU. Raises UsageError if it cannot be used."""
    if not isinstance(device, str | torch.device):
        raise UsageError(f"device={shown(device)}: give 'auto', a name such as {EXAMPLES}, or a torch.device")
    if device == "auto":
        return torch.device(accelerator() or "cpu")
    try:
        chosen = torch.device(device)
        refuse_missing(chosen)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        why = f"{error}".splitlines()[0].rstrip(".")
        there = accelerator() or "cpu"
        raise UsageError(
            f"device {str(device)!r} cannot be used here: {why}; give 'auto', which is {there!r} on this machine"
        ) from error
    return chosen


def refuse_missing(device: torch.device) -> None:
    """Raise UsageError for an accelerator whose number is too high."""
    kind = accelerator()
    if device.type == kind and device.index is not None and device.index >= torch.accelerator.device_count():
        there = ", ".join(f"'{kind}:{index}'" for index in range(torch.accelerator.device_count()))
        raise UsageError(f"device {str(device)!r} is not there: this machine has {there}, and 'cpu'")


def pick_device_of(device: str | torch.device, local_rank: int) -> torch.device:
    """The device of a process: "auto" or a bare kind ("cuda") gives local rank r accelerator r, modulo their number."""
    kind = accelerator()
    if kind is not None and device in ("auto", kind):
        return pick_device(f"{kind}:{local_rank % torch.accelerator.device_count()}")
    return pick_device(device)


def accelerator_names() -> list[str]:
    """The product name of each accelerator of this machine; empty without one."""
    kind = accelerator()
    return [] if kind is None else [name_of(torch.device(kind, i)) for i in range(torch.accelerator.device_count())]


def uuid_of(device: torch.device) -> str | None:
    """The UUID of an accelerator; None if it has none."""
    module: Any = torch.get_device_module(device)
    properties = module.get_device_properties(device) if hasattr(module, "get_device_properties") else None
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def name_of(device: torch.device) -> str:
    """The product name of an accelerator, or its kind if torch does not tell; "cpu" for the CPU."""
    if device.type in HOST:
        return device.type
    module: Any = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all its queued work; returns at once for the CPU, which runs synchronously."""
    if device.type not in HOST:
        torch.accelerator.synchronize(device)


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """A function that waits for a device; None for the CPU, so that the caller need not read the clock again."""
    return None if device.type in HOST else partial(synchronize, device)


def own_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of a device; None on the CPU."""
    return None if device.type in HOST else torch.Stream(device)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for tensors of a device; torch has none for those without numbers, on meta."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def running_on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """A context in which work is queued on this stream; without a stream it does nothing."""
    return nullcontext() if stream is None else stream


def host_memory(size: int, device: torch.device) -> Tensor:
    """An uninitialized uint8 tensor [size] in the host's memory, for copies to or from a device.

    Pinned if the device is an accelerator: such copies are asynchronous and need no second buffer.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type not in SHARED_MEMORY)


def generator_of(device: torch.device) -> "torch.Generator | SingleGenerator":
    if device.type in HOST:
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # creates the generators
    if not hasattr(module, "default_generators"):
        return SingleGenerator(module)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


class SingleGenerator:
    """A torch.Generator's methods for a kind of accelerator (mps) whose module has no `default_generators`."""

    def __init__(self, module: Any) -> None:
        self.manual_seed: Callable[[int], object] = module.manual_seed
        self.get_state: Callable[[], Tensor] = module.get_rng_state
        self.set_state: Callable[[Tensor], object] = module.set_rng_state


def generators(device: torch.device) -> "tuple[torch.Generator | SingleGenerator, ...]":
    """The CPU's random generator, and the device's if it has one of its own."""
    return (torch.default_generator,) if device.type in HOST else (torch.default_generator, generator_of(device))


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """A context after which the random generators of the CPU and of this device are as before."""
    if device.type in HOST:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def default_backend() -> str | None:
    """The backend of torch's default process group: "gloo" if torch has none for the device, else None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type in dist.Backend.default_device_backend_map else "gloo"


def direct_backend(device: torch.device) -> str | None:
    """The torch.distributed backend that sends tensors between devices of this kind without the host, such as "nccl".

    None if there is none, as on the CPU.
    """
    name = dist.Backend.default_device_backend_map.get(device.type)
    return None if name in (None, "gloo") or not dist.is_backend_available(name) else name


def serial_number(device: torch.device) -> str | None:
    """An accelerator's UUID, unique over all machines; None if torch does not know it."""
    if device.type in HOST:
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.uuid) if hasattr(properties, "uuid") else None


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Compute with so many threads in this block; afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
