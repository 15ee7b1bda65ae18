"""Built-in networks: flat lists of blocks that know nothing of parallelism."""

from stretto.models.model import Model
from stretto.models.table import MODELS, build

__all__ = ["MODELS", "Model", "build"]
