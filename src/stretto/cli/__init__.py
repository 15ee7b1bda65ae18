"""The command line, one file a verb. Nothing here may import torch at the top: `--help` answers within 0.3 s."""

from stretto.cli.program import main, run_and_exit

__all__ = ["main", "run_and_exit"]
