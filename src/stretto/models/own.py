"""A user's own model: a function in a file or a package of theirs that makes it."""

from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.options.import_object import import_object


def own_model(text: str) -> tuple[nn.Module, Any]:
    """Call the function `package.module:function` or `path/to/file.py:function`.

    Returns the module, and the example input that the function gives beside it, None if it gives none. Raises
    UsageError where there is no such function, where it raises, and where it returns something else.
    """
    build = import_object(text)
    try:
        made = build()
    except Exception as error:
        raise UsageError(f"{text} raised {type(error).__name__}: {error}") from error
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    inputs = example if isinstance(example, tuple) else (example,)
    if not isinstance(model, nn.Module) or not (example is None or all(isinstance(part, Tensor) for part in inputs)):
        raise UsageError(
            f"{text} returned {type(made).__name__}: return an nn.Module, or (module, example) with one input batch, a "
            "tensor or a tuple of tensors"
        )
    return model, example
