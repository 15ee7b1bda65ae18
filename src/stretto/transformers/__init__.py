"""Inside transformers: `StrettoTrainer`, its Trainer with a pipeline, or any other method, underneath."""

from stretto.options.extras import require

require("transformers", "stretto.transformers")

from stretto.transformers.trainer import StrettoTrainer  # noqa: E402 (it imports what may be missing)

__all__ = ["StrettoTrainer"]
