"""The fork server imports this first: from then on it ends with its starter. In other processes it does nothing."""

from stretto.processes import lifeline

lifeline.serve()
