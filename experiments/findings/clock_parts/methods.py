"""The asynchronous and the local method that study 5 measures: named once, before its first timed run."""

from clock_parts.settings import SETTINGS, Chosen

ASYNCHRONOUS: dict[str, str] | None = None
LOCAL: dict[str, str] | None = None
"""A method with its options by setting, such as {"A": "pb-lwp-sc", "B": "pipedream(rotate=True)"}; "{processes}" in it
stands for the number of processes, as in "chunked(chunks={processes})". What studies 1 to 3 found best."""


def chosen() -> Chosen:
    """The methods by kind and setting. Raises SystemExit until both are named for every setting."""
    named = {"asynchronous": ASYNCHRONOUS, "local": LOCAL}
    for kind, by_setting in named.items():
        missing = [letter for letter in SETTINGS if letter not in (by_setting or {})]
        if missing:
            raise SystemExit(
                f"study 5 has no {kind} method for setting {' and '.join(missing)}: after studies 1 and 3, name what "
                f"they found best as {kind.upper()} in experiments/findings/clock_parts/methods.py, in a commit before "
                "the first timed run (rules.md)"
            )
    return {kind: dict(by_setting or {}) for kind, by_setting in named.items()}
