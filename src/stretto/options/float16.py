"""The refusal of float16: the same words in Python and on the command line."""

from stretto.errors import UsageError

NAMES = {"fp16", "float16", "f16", "half", "16"}


def refuse_float16(precision: object) -> None:
    """Raise UsageError for a precision that asks for float16, by any of the names that it has elsewhere."""
    words = str(precision).lower().removeprefix("torch.").replace("_", "-").split("-")
    if NAMES & {*words}:
        raise UsageError(
            f"precision={str(precision)!r}: there is no float16. It needs a loss scale that all stages change, and "
            "updates that all of them skip, together; stages that update at different times cannot "
            "(docs/guide/python.md says more). Take bf16, whose range is that of float32, or bf16-autocast"
        )
