"""Inside transformers: `StrettoTrainer`, its Trainer with a pipeline, or any other method, underneath."""

from importlib.metadata import version

from stretto.errors import UsageError
from stretto.options.extras import require

OLDEST = (5, 12)  # the steps of Trainer.train that are overridden are methods of their own

require("transformers", "stretto.transformers")
if tuple(int(part) for part in version("transformers").split(".")[:2]) < OLDEST:
    raise UsageError(
        f"stretto.transformers needs transformers {'.'.join(map(str, OLDEST))} or newer, and {version('transformers')} "
        "is installed: pip install --upgrade transformers"
    )

from stretto.transformers.trainer import StrettoTrainer  # noqa: E402 (it imports what may be missing)

__all__ = ["StrettoTrainer"]
