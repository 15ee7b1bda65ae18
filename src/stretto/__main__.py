"""`stretto`, `python -m stretto`, and so `torchrun -m stretto`."""

import sys

from stretto import interrupts


def run() -> None:
    """Run the command of this process's own arguments, and end the process."""
    interrupts.take(sys.argv[1:])  # before anything that takes time to import
    from stretto.cli import run_and_exit

    run_and_exit()


if __name__ == "__main__":
    run()
