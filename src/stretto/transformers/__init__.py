"""Inside transformers: `StrettoTrainer`, its Trainer with a pipeline, or any other method, underneath.

Each process looks like a single one, of its own index: seen as several, it would be wrapped for data parallelism,
given other batches than its neighbours, and have its counts added up. A model's loss is found by trying the known
ones on a batch: models compute it in their forwards, in ten ways. The optimizer that transformers makes for the whole
model is copied for each stage.
"""

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
