"""An accelerator made up of the host's memory and processor, for tests of what is said to accelerators.

torch reserves one kind of device for backends from outside (PrivateUse1) and lets Python write its kernels. A tensor
of the stand-in has a storage of its own kind, whose memory is the host's: DLPack hands memory over with the number of
a device in front, and here that number is exchanged. Every operation then runs on the CPU, on the same memory, so that
numbers are the CPU's to the last bit. What makes it a device:

- operations refuse tensors of the host, as a GPU's do, and `numpy()` is refused by torch itself;
- random numbers come from a generator of its own, not the CPU's;
- copies that need not be waited for (pinned, non_blocking) wait for the next operation, stream or synchronization, so
  that memory which is used again too early has wrong numbers;
- it counts what it is asked: `counts`.

`install()` is for a process of its own, before its first backward: torch registers such a backend for good, and makes
the threads of its backwards once. `link=True` adds a backend of torch.distributed that sends its memory directly, as
NCCL does that of a GPU.

torch's hooks for Python backends know one device, and no storage that is resized, which fully-shard's do.
"""

import ctypes
import os
from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
DLPACK_CPU, DLPACK_EXTENSION = 1, 12
MIXED = ("aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")  # a GPU's take the host's indices, too
KEY = "PrivateUse1"

counts = Counter()
generator = torch.Generator()
_pending = []  # copies that have been asked for and not yet been made
_pinned = set()  # where pinned memory begins
_libraries = []  # a registered kernel lives as long as its library


class Header(ctypes.Structure):
    """The beginning of DLPack's DLTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def relabelled(tensor, kind):
    """The same memory as a tensor of another kind of device."""
    capsule = torch._C._to_dlpack(tensor.detach() if tensor.requires_grad else tensor)
    header = Header.from_address(pointer_of(capsule, b"dltensor"))
    header.kind, header.index = kind, 0
    return torch._C._from_dlpack(capsule)


def on_device(value):
    return relabelled(value, DLPACK_EXTENSION) if isinstance(value, torch.Tensor) else value


def on_host(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return relabelled(value, DLPACK_CPU) if is_here(value) else value


def is_here(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def finish():
    """Make the copies that wait."""
    while _pending:
        _pending.pop(0)()


def synchronize(device=None):
    counts["synchronized"] += 1
    finish()


class Stream(torch.Stream):
    """Counts those that wait for it."""

    def synchronize(self):
        counts["streams synchronized"] += 1
        finish()


def fallback(op, *args, **kwargs):
    """Any operation of torch that has no kernel below."""
    finish()
    counts["operations"] += 1
    refuse_mixtures(op, args, kwargs)
    host_args, host_kwargs = tree_map(on_host, (args, kwargs))
    for argument in op._schema.arguments:
        if argument.is_out and not kwargs[argument.name].numel():  # it may grow, which borrowed memory cannot
            host_kwargs[argument.name] = torch.empty(0, dtype=kwargs[argument.name].dtype)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    result = drawing(op, host_args, host_kwargs) if draws else op(*host_args, **host_kwargs)
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    results = result if isinstance(result, tuple) else (result,)
    made = [returned(op, given, *pair) for pair in zip(op._schema.returns, results, strict=True)]
    return made[0] if len(made) == 1 else tuple(made)


def refuse_mixtures(op, args, kwargs):
    def look(value):
        if isinstance(value, torch.Tensor) and value.dim() and not is_here(value):
            raise RuntimeError(f"{op}: expected all tensors on {NAME}, found {list(value.shape)} on {value.device}")
        return value

    if op._schema.name not in MIXED:
        tree_map(look, (args, kwargs))


def drawing(op, args, kwargs):
    """The device's generator in the place of the CPU's."""
    counts["draws"] += 1
    cpu = torch.default_generator
    state = cpu.get_state()
    cpu.set_state(generator.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(cpu.get_state())
        cpu.set_state(state)


def returned(op, given, declared, result):
    """What an operation returns: what it has written into, a view of what it was given, or something new."""
    if declared.alias_info is None:
        return tree_map(on_device, result)
    origin = next(
        given[argument.name] for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.before_set & declared.alias_info.before_set
    )  # fmt: skip
    if not declared.alias_info.is_write:
        assert result.dtype == origin.dtype, op
        offset = (result.data_ptr() - origin.data_ptr()) // result.itemsize if result.numel() else 0
        return as_strided(origin, result.shape, result.stride(), origin.storage_offset() + offset)
    if result.shape != origin.shape:
        origin.data = on_device(result)
    return origin


def as_strided(self, size, stride, storage_offset=None):
    offset = self.storage_offset() if storage_offset is None else storage_offset
    return torch.ops.aten.alias(self).as_strided_(size, stride, offset)  # both are torch's own, and keep the storage


def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return on_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return on_device(torch.empty_strided(size, stride, dtype=dtype))


def copy_from(self, dst, non_blocking=False):
    source, target = on_host(self), on_host(dst)
    if non_blocking and is_here(self) != is_here(dst) and is_pinned(self if is_here(dst) else dst):
        counts["pinned copies"] += 1
        _pending.append(lambda: target.copy_(source))
    else:
        finish()
        target.copy_(source)
    return dst


def to_copy(
    self, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None
):  # fmt: skip
    """`tensor.to(...)` from the device or to it."""
    leaves = device is not None and device.type == "cpu"
    made = torch.empty_like(on_host(self), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    if leaves and non_blocking:  # torch takes pinned memory for such a copy
        _pinned.add(made.data_ptr())
    return copy_from(self, made if leaves else on_device(made), non_blocking)


def is_pinned(tensor):
    return tensor.untyped_storage().data_ptr() in _pinned


def convolution(*args):
    finish()
    refuse_mixtures(torch.ops.aten.convolution.default, args, {})
    return on_device(torch.ops.aten.convolution(*tree_map(on_host, args)))


def convolution_backward(gradient, x, weight, stride, padding, dilation, transposed, output_padding, groups, wanted):
    finish()
    biases = [weight.shape[1] * groups if transposed else weight.shape[0]]
    made = torch.ops.aten.convolution_backward(
        on_host(gradient), on_host(x), on_host(weight), biases, stride, padding, dilation, transposed, output_padding,
        groups, wanted,
    )  # fmt: skip
    return tuple(map(on_device, made))


def set_(self, storage, offset, size, stride=()):
    self.data = as_strided(on_device(bytes_of(storage).view(self.dtype)), size, stride, offset)
    return self


def bytes_of(storage):
    """A storage's memory as a tensor of the host [bytes], which keeps the storage."""
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage
    return torch.frombuffer(memory, dtype=torch.uint8) if storage.nbytes() else torch.empty(0, dtype=torch.uint8)


KERNELS = {
    "as_strided": as_strided,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "_copy_from": copy_from,
    "_to_copy": to_copy,
    "convolution_overrideable": convolution,
    "convolution_backward_overrideable": convolution_backward,
    "set_.source_Storage_storage_offset": set_,
}


def backend_module():
    """What `torch.get_device_module` gives for it."""
    return SimpleNamespace(
        default_generators=(generator,),
        device_count=lambda: 1,
        current_device=lambda: 0,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed=generator.manual_seed,
        manual_seed_all=generator.manual_seed,
        get_rng_state=lambda device=NAME: generator.get_state(),
        set_rng_state=lambda state, device=NAME: generator.set_state(state),
        current_stream=lambda: Stream(NAME),
        stream=lambda stream: stream,
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        get_device_name=lambda index: "Stand-in",
        get_device_properties=lambda device: SimpleNamespace(uuid=f"stand-in of rank {os.environ.get('RANK', 0)}"),
    )


def install(link=False):
    """Make it this process's accelerator, for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=backend_module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(fallback, KEY)
    operations = torch.library.Library("aten", "IMPL")
    for name, kernel in KERNELS.items():
        operations.impl(name, kernel, KEY)
    _libraries.extend((library, operations))
    # A module that is moved to a GPU keeps its parameters; for other backends that has to be asked for.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.accelerator.synchronize = synchronize
    torch.empty = pinning(torch.empty)
    torch.UntypedStorage.clone = cloning(torch.UntypedStorage.clone)
    torch.Stream = Stream
    if link:
        dist.Backend.register_backend("link", dist.ProcessGroupGloo, devices=[NAME])


def pinning(allocate):
    def empty(*args, pin_memory=False, **kwargs):
        made = allocate(*args, **kwargs)
        if pin_memory:
            counts["pinned"] += 1
            _pinned.add(made.data_ptr())
        else:
            _pinned.discard(made.data_ptr())
        return made

    return empty


def cloning(clone):
    def copy(storage):
        if storage.device.type != NAME:
            return clone(storage)
        finish()
        return on_device(bytes_of(storage).clone()).untyped_storage()

    return copy
