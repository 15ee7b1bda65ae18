"""Everything that Stretto knows of devices, in one file: all others ask here, and none of them names a kind of device.

What torch says alike of every accelerator comes from `torch.accelerator`, what it says of a kind from
`torch.get_device_module`. On the CPU each function is that of a program that has never heard of accelerators.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import UsageError
from stretto.options.checks import shown

CPU = torch.device("cpu")
EXAMPLES = "'cpu' or 'cuda:1'"  # for messages
WITHOUT_FLOAT64 = ("mps",)  # "auto" leaves them out: losses are averaged in float64
HOST = ("cpu", "meta")  # what they do is done when a function returns; they have no generator of their own
SHARED_MEMORY = (*HOST, "mps")  # they read the host's memory as it is
SPECIFIC_METHODS = ("cpu", "cuda")  # of torch.Tensor, which move it to a kind of device
SPECIFIC_ATTRIBUTES = ("is_cuda", "is_cpu")  # of torch.Tensor, which say whether it is on one


def accelerator() -> str | None:
    """The kind of accelerator that "auto" takes, None if that is the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in WITHOUT_FLOAT64 else found.type


def pick_device(device: str | torch.device) -> torch.device:
    """Turn "auto" into the best device there is; refuse one that is not there."""
    if not isinstance(device, str | torch.device):
        raise UsageError(f"device={shown(device)}: give 'auto', a name such as {EXAMPLES}, or a torch.device")
    if device == "auto":
        return torch.device(accelerator() or "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {device!r} cannot be used here: {error}. Try device='auto'") from error
    return chosen


def pick_device_of(device: str | torch.device, local_rank: int) -> torch.device:
    """The device of one of several processes of a machine: where "auto" or its kind is asked for, each in turn."""
    kind = accelerator()
    if kind is not None and device in ("auto", kind):
        return pick_device(f"{kind}:{local_rank % torch.accelerator.device_count()}")
    return pick_device(device)


def accelerator_names() -> list[str]:
    """What the makers call each accelerator of this machine; none without one."""
    kind = accelerator()
    if kind is None:
        return []
    module: Any = torch.get_device_module(kind)
    return [str(module.get_device_name(index)) for index in range(torch.accelerator.device_count())]


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given; at once on the CPU, which is done when a function returns."""
    if device.type not in HOST:
        torch.accelerator.synchronize(device)


def synchronizer(device: torch.device) -> Callable[[], None] | None:
    """A function that waits for a device, None where there is nothing to wait for: clocks need not be read again."""
    return None if device.type in HOST else partial(synchronize, device)


def own_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of a device, None on the CPU."""
    return None if device.type in HOST else torch.Stream(device)


def running_on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """While it lasts, a device is given work on this stream; without one nothing changes."""
    return nullcontext() if stream is None else stream


def host_memory(size: int, device: torch.device) -> Tensor:
    """`size` bytes of the host's memory [size], not initialized, for what goes to or comes from a device.

    Pinned where that is an accelerator: copies need no second buffer, and the host need not wait for them.
    """
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type not in SHARED_MEMORY)


def generator_of(device: torch.device) -> "torch.Generator | SingleGenerator":
    """The global random generator of a device."""
    if device.type in HOST:
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    if hasattr(module, "init"):
        module.init()  # without which there are no generators
    if not hasattr(module, "default_generators"):
        return SingleGenerator(module)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


class SingleGenerator:
    """The generator of a kind of accelerator of which a machine has one, by the functions of torch's module for it."""

    def __init__(self, module: Any) -> None:
        self.manual_seed: Callable[[int], object] = module.manual_seed
        self.get_state: Callable[[], Tensor] = module.get_rng_state
        self.set_state: Callable[[Tensor], object] = module.set_rng_state


def generators(device: torch.device) -> "tuple[torch.Generator | SingleGenerator, ...]":
    """That of the CPU, and the device's where that is another."""
    return (torch.default_generator,) if device.type in HOST else (torch.default_generator, generator_of(device))


def forked_generators(device: torch.device) -> AbstractContextManager[None]:
    """Afterwards the generators of the CPU and of this device are as they were."""
    if device.type in HOST:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def default_backend() -> str | None:
    """The backend of torch's default process group; None lets torch choose, which it does for those it knows."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type in dist.Backend.default_device_backend_map else "gloo"


def direct_backend(device: torch.device) -> str | None:
    """The backend of torch.distributed by which tensors travel between devices of this kind without passing the host.

    None if there is none, as on the CPU.
    """
    name = dist.Backend.default_device_backend_map.get(device.type)
    return None if name in (None, "gloo") or not dist.is_backend_available(name) else name


def serial_number(device: torch.device) -> str | None:
    """What tells an accelerator from all others, on any machine; None if torch does not know."""
    if device.type in HOST:
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(properties.uuid) if hasattr(properties, "uuid") else None
