"""Same numbers on every machine: one thread (float64 sums differ between one and two), no random examples."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("stretto", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("stretto")
