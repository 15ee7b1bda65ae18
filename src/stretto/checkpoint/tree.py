"""A nested state in two parts: a tree that JSON can hold, and the tensors by name.

None, booleans, numbers, strings and lists stand for themselves; everything else is an object with a tag:
{"dict": [[key, value], ...]}, so that keys keep their types and their order; {"tuple": [...]};
{"tensor": name, "dtype": ..., "shape": ..., "stride": ...}.
Floats read back from JSON are the same (nan and inf as Python writes them).
"""

import base64
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import UsageError

SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "Size": torch.Size}
MAPPINGS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
TAGS = {kind: tag for tag, kind in {**SEQUENCES, **MAPPINGS}.items()}


def flatten(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """The tree of a state, and its tensors by name: `unflatten` puts them together again.

    Raises UsageError, naming the object by its keys, for an object that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(state, (), tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `flatten` took apart: equal values of equal types, with the given tensors.

    An object that the state held twice becomes two objects.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if not tree:
        raise ValueError("an object without a tag")
    tag, content = next(iter(tree.items()))
    if tag == "tensor":
        return tensors[content]
    if tag == "bytes":
        return base64.b64decode(content)
    if tag == "dtype":
        return getattr(torch, content)
    if tag in SEQUENCES:
        return SEQUENCES[tag](unflatten(content, tensors))
    mapping = MAPPINGS[tag]({unflatten(key, tensors): unflatten(value, tensors) for key, value in content})
    if "attributes" in tree:
        vars(mapping).update(unflatten(tree["attributes"], tensors))
    return mapping


def empty_tensors(tree: Any) -> dict[str, Tensor]:
    """Uninitialised CPU tensors for all that `tree` names, with their dtypes, shapes and strides."""
    if isinstance(tree, dict) and "tensor" in tree:
        dtype: torch.dtype = getattr(torch, tree["dtype"])
        return {tree["tensor"]: torch.empty_strided(tree["shape"], tree["stride"], dtype=dtype)}
    parts = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
    return {name: tensor for part in parts for name, tensor in empty_tensors(part).items()}


def _pack(value: Any, path: tuple[Any, ...], tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is list:
        return [_pack(item, (*path, index), tensors) for index, item in enumerate(value)]
    if isinstance(value, Tensor):
        return _pack_tensor(value, path, tensors)
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if type(value) is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    tag = TAGS.get(type(value))
    if tag in SEQUENCES:
        return {tag: _pack(list(value), path, tensors)}
    if tag in MAPPINGS:
        pairs = [[_pack(key, (*path, key), tensors), _pack(item, (*path, key), tensors)] for key, item in value.items()]
        attributes = getattr(value, "__dict__", None)  # a module's state_dict has its versions in `_metadata`
        return {tag: pairs} | ({"attributes": _pack(attributes, path, tensors)} if attributes else {})
    raise UsageError(f"a checkpoint cannot hold {_name(path)}: it is a {type(value).__qualname__}. {KEEPS}")


KEEPS = "It holds tensors, numbers, strings, bytes, and dicts, lists, tuples and sets of them"


def _pack_tensor(tensor: Tensor, path: tuple[Any, ...], tensors: dict[str, Tensor]) -> dict[str, Any]:
    strided = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if type(tensor) not in (Tensor, nn.Parameter) or not strided:
        kind = f"{type(tensor).__qualname__} of layout {tensor.layout} on {tensor.device}"
        raise UsageError(f"a checkpoint cannot hold {_name(path)}: it is a {kind}. It holds plain, dense tensors")
    name = _name(path)
    while name in tensors:  # the keys 0 and "0", or "a.b" and "b" in "a"
        name += "'"
    tensors[name] = tensor.detach()
    dense = torch.empty_like(tensor, device="meta")  # strides in the same order, without gaps
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"tensor": name, "dtype": dtype, "shape": list(tensor.shape), "stride": list(dense.stride())}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))
