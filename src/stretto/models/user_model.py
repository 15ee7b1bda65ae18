"""The user's own model, made by a function in a file or a package."""

from typing import Any

from torch import Tensor, nn

from stretto.errors import UsageError
from stretto.options.import_object import import_object


def user_model(text: str) -> tuple[nn.Module, Any]:
    """Call the function `package.module:function` or `path/to/file.py:function`.

    Returns the module and the example input that the function returned with it, or None. Raises UsageError if there is
    no such function, if it raises an error, or if it returns anything else.
    """
    build = import_object(text)
    try:
        result = build()
    except Exception as error:
        raise UsageError(f"{text} raised {type(error).__name__}: {error}") from error
    model, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    inputs = example if isinstance(example, tuple) else (example,)
    if not isinstance(model, nn.Module) or not (example is None or all(isinstance(part, Tensor) for part in inputs)):
        raise UsageError(
            f"{text} returned {type(result).__name__}: return an nn.Module, or (module, example) with one input batch, "
            "a tensor or a tuple of tensors"
        )
    return model, example
