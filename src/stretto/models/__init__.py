"""Built-in networks: flat lists of blocks that know nothing of parallelism.

Networks without data (`published.py`) are modules like all others, so what a plan says of them is read off operators,
not formulas: one layer for query, key and value, whose rows go by key head; the core of attention as a module, which
is recomputed alone; operators of our own where GPUs have one kernel and torch on a CPU ten. How stored names become a
model's is asked of transformers, in `hugging_face.py` alone.
"""

from stretto.models.model import Model
from stretto.models.table import MODELS, build

__all__ = ["MODELS", "Model", "build"]
