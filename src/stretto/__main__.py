"""`python -m stretto`, and so `torchrun -m stretto`."""

import sys

from stretto.cli import main

sys.exit(main())
