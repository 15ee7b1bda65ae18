"""Hashes of a state's tensors and of the rest of it, so that what replicas have in common is written once."""

from collections.abc import Mapping

from torch import Tensor

from stretto.nn.state_check import hash_of, hash_of_bytes

Contents = Mapping[str, str]  # hexadecimal hashes: of the tree under "", of each tensor under its name

TREE = ""  # the tree's key


def contents_of(tree: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The hashes of a flattened state: of its tree, as JSON, and of each tensor's dtype, shape and values."""
    return {TREE: hash_of_bytes(tree.encode()), **{name: hash_of(tensor) for name, tensor in tensors.items()}}
