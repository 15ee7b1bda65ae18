"""Refuses a commit message whose subject is longer than 72 characters, or is not followed by an empty line."""

import sys
from pathlib import Path

LIMIT = 72  # characters


def complaint(message: str) -> str | None:
    """What is wrong with a commit message; None if nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if not subject.strip():
        return "the message begins with an empty line: write what changes, in at most 72 characters"
    if len(subject) > LIMIT:
        return f"the subject has {len(subject)} characters, {len(subject) - LIMIT} too many; the why goes to the body"
    if len(lines) > 1 and lines[1].strip():
        return "the second line is not empty: git takes it for a part of the subject"
    return None


if __name__ == "__main__":
    if problem := complaint(Path(sys.argv[1]).read_text()):
        sys.exit(f"commit message: {problem}")
