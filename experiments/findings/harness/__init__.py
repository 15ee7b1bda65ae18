"""What all studies share: cells and runs, successive halving, intervals and verdicts, the store, the page.

A study is one file beside this folder (`depth.py`) with a `STUDY`; `main.py` runs it and writes its page. The rules
that this follows are in rules.md.
"""

from harness.cells import Cell, Claim, Run, Study
from harness.training import held_out, measured_training, shuffled

__all__ = ["Cell", "Claim", "Run", "Study", "held_out", "measured_training", "shuffled"]
