"""The asynchronous and the local method that study 5 measures: named once, before its first timed run."""

from clock_parts.settings import PROCESSES, SETTINGS, Chosen

METHODS: Chosen = {
    "asynchronous": {"A": dict.fromkeys(PROCESSES, "spectrain"), "B": dict.fromkeys(PROCESSES, "pipedream-2bw")},
    "local": {letter: dict.fromkeys(PROCESSES, "chunked(chunks=2)") for letter in SETTINGS},
}
"""What `method="async"` and `"local"` stood for, with SGD in setting A and AdamW in B, when studies 1, 2 and 6 and of
study 3 the MLP and the decoder were there."""
