"""Checks types, shapes and keys of a saved state before it is loaded: checksums find damage, not foreign states."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError

NUMBERS = (int, float)
NEEDED = {"lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "alpha", "rho", "lr_decay"}
"""Keys that optimizers' groups have had in every version of torch; torch itself sets newer keys if they are missing."""
SIDES = {
    "left_correlation": 0,
    "right_correlation": 1,
    "left_product": 0,
    "right_product": 1,
    "left_basis": 0,
    "right_basis": 1,
}
"""State of SOAP and of a rotation for a matrix [m, n]: [m, m] for 0, [n, n] for 1."""
MISFITS = (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@contextmanager
def explaining_misfits(what: str) -> Iterator[None]:
    """In this block an error of a state that cannot be loaded becomes UsageError: `what`, then the original error."""
    try:
        yield
    except MISFITS as error:
        raise UsageError(f"{what}: {error}") from error


def check_part(saved: Any, part: Any) -> None:
    """Raise ValueError if `saved` is no state of `part`: an optimizer, a scheduler or the like.

    A module is not checked here: its load_state_dict checks it.
    """
    if isinstance(part, torch.optim.Optimizer):
        check_optimizer(saved, part)
    elif not isinstance(part, nn.Module):
        check_like(saved, part.state_dict(), "state")


def check_updates(count: Any) -> None:
    """Raise ValueError unless `count` is an int of at least 0."""
    if type(count) is not int or count < 0:
        raise ValueError(f"updates is {count!r}, expected a whole number of at least 0")


def check_like(saved: Any, current: Any, where: str) -> None:
    """Raise ValueError, naming the place, if `saved` has another type than the `current` state.

    Tensors need the same shape; the entries that both mappings or sequences have are compared one by one. Where
    `current` has no value yet (None, a missing key), any value is accepted.
    """
    if current is None:
        return
    if isinstance(current, Tensor):
        _check_tensor(saved, current, where)
    elif isinstance(current, Mapping):
        _check(isinstance(saved, Mapping), saved, current, where)
        for key in current.keys() & saved.keys():
            check_like(saved[key], current[key], f"{where}.{key}")
    elif isinstance(current, list | tuple):
        _check(isinstance(saved, list | tuple), saved, current, where)
        for index, (saved_entry, current_entry) in enumerate(zip(saved, current, strict=False)):
            check_like(saved_entry, current_entry, f"{where}.{index}")
    elif isinstance(current, bool):
        _check(isinstance(saved, bool), saved, current, where)
    elif isinstance(current, NUMBERS):
        _check(isinstance(saved, NUMBERS) and not isinstance(saved, bool), saved, current, where)
    elif isinstance(current, str):
        _check(isinstance(saved, str), saved, current, where)


def check_optimizer(saved: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if `saved` is no state of this optimizer: its groups, then its values for each parameter."""
    check_like(saved, {**optimizer.state_dict(), "state": {}}, "optimizer")
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=False):
        if missing := sorted(NEEDED & group.keys() - saved_group.keys()):
            raise ValueError(f"optimizer.param_groups has no {missing[0]}")
    numbers = chain.from_iterable(group["params"] for group in saved["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=False):
        values = saved["state"].get(number, {})
        _check(isinstance(values, Mapping), values, {}, f"optimizer.state.{number}")
        for name, value in values.items():
            check_state_value(value, parameter, optimizer, f"optimizer.state.{number}.{name}", counts=name == "step")


def check_state_value(
    value: Any, parameter: Tensor, optimizer: torch.optim.Optimizer, where: str, *, counts: bool
) -> None:
    """Raise ValueError for a value that the optimizer cannot hold for a parameter.

    torch's optimizers hold a tensor of one element or of the parameter's shape, SOAP and rotations also square ones for
    rows and columns; `counts`: the value may be a plain number, a count of steps. Adafactor (rows and columns), LBFGS
    (all parameters at once) and optimizers from elsewhere are not checked.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith(("torch.optim", "stretto.optim")) or kind.__name__ in ("Adafactor", "LBFGS"):
        return
    if isinstance(value, Tensor):
        side = SIDES.get(where.rpartition(".")[2])
        if side is not None:
            size = parameter.shape[0] if side == 0 else parameter.shape[1:].numel()
            _check_tensor(value, parameter.new_empty(size, size, device="meta"), where)
        elif value.numel() != 1:
            _check_tensor(value, parameter, where)
    elif not (value is None or (counts and type(value) in NUMBERS)):
        raise ValueError(f"{where} is {value!r}")


def check_weights(saved: Any, current: Mapping[str, Any], module: nn.Module) -> None:
    """Raise ValueError if `saved` is no state of the weight rules: tensors by the names of parameters, and counts."""
    check_like(saved, current, "weights")
    parameters = dict(module.named_parameters())
    for rule, state in saved.items():
        for name, tensors in state.items() if isinstance(state, Mapping) else ():
            if isinstance(tensors, Mapping):
                for parameter, tensor in tensors.items():
                    if parameter not in parameters:
                        raise ValueError(f"weights.{rule}.{name} has {parameter!r}, which is no parameter")
                    _check_tensor(tensor, parameters[parameter], f"weights.{rule}.{name}.{parameter}")


def _check_tensor(saved: Any, current: Tensor, where: str) -> None:
    if not isinstance(saved, Tensor):
        _check(False, saved, current, where)
    if saved.shape != current.shape:
        raise ValueError(f"{where} is of shape {list(saved.shape)}, expected {list(current.shape)}")


def _check(good: bool, saved: Any, current: Any, where: str) -> None:
    if not good:
        raise ValueError(f"{where} is a {type(saved).__name__}, expected a {type(current).__name__}")


def hash_of(tensor: Tensor) -> str:
    """The hash of a tensor's dtype, shape and values, in hexadecimal, whatever its strides and device."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    values = plain.reshape(-1).view(torch.uint8).numpy()
    return hash_of_bytes(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), values.data)


def hash_of_bytes(*parts: bytes | memoryview) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
