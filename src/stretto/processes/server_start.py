"""What the fork server imports first, so that it ends with its starter from then on. Elsewhere it does nothing."""

from stretto.processes import lifeline

lifeline.serve()
