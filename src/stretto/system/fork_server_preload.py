"""The fork server imports this first: from then on it ends with its starter. In other processes it does nothing."""

import tempfile

from stretto.system import lifeline

lifeline.serve()
tempfile.gettempdir()  # tried by a file, which a fork that is told to end meanwhile would leave there; then kept
