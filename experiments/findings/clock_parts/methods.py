"""The asynchronous and the local method that study 5 measures: named once, before its first timed run."""

from clock_parts.settings import PROCESSES, SETTINGS, Chosen

ASYNCHRONOUS: dict[str, dict[int, str]] | None = None
LOCAL: dict[str, dict[int, str]] | None = None
"""A method with its options by setting and number of processes, such as {"A": {2: "pb-lwp-sc", 4: "pb-lwp-sc"}, "B":
{2: "pipedream-2bw", 4: "pipedream(rotate=True)"}}: what studies 1 to 3 found best."""


def chosen() -> Chosen:
    """The methods by kind, setting and processes. Raises SystemExit until all are named."""
    named = {"asynchronous": ASYNCHRONOUS or {}, "local": LOCAL or {}}
    for kind, by_setting in named.items():
        missing = [
            f"setting {letter} on {processes} processes"
            for letter in SETTINGS
            for processes in PROCESSES
            if processes not in by_setting.get(letter, {})
        ]
        if missing:
            raise SystemExit(
                f"study 5 has no {kind} method for {' and '.join(missing)}: after studies 1 and 3, name what they "
                f"found best as {kind.upper()} in experiments/findings/clock_parts/methods.py, in a commit before the "
                "first timed run (rules.md)"
            )
    return named
