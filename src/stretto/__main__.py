"""`python -m stretto`, and so `torchrun -m stretto`."""

from stretto.cli import run_and_exit

run_and_exit()
