"""The command line, one file a verb. Nothing here may import torch at the top: `--help` answers within 0.3 s."""

from stretto.cli.main import main

__all__ = ["main"]
