"""Data sets, embedded or read from files: nothing is downloaded, and splits are the same on every machine."""

from stretto.data.dataset import Dataset, Split, forever
from stretto.data.table import DATASETS, load

__all__ = ["DATASETS", "Dataset", "Split", "forever", "load"]
