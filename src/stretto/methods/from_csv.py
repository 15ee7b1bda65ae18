"""The method `csv`: a schedule from a file (`schedule/csv_file.py`), its backward that of backpropagation."""

import hashlib
from pathlib import Path

from stretto.errors import UsageError
from stretto.methods.definition import Method
from stretto.options.checks import of_kind
from stretto.schedule import Schedule
from stretto.schedule.csv_file import read_csv


def csv(*, path: str | None = None, digest: str | None = None) -> Method:
    """Train by the schedule in a file. digest: the first 12 digits of the SHA-256 of its bytes, which must match.

    The digest becomes part of the method's name, and so of a run's identity: a run does not go on with another file.
    """
    if path is None:
        raise UsageError("csv: which file? path='schedule.csv', such as stretto show --csv writes")
    schedule = read_csv(path)
    actual = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    if digest is not None:
        of_kind("csv: digest", digest, str, "12 hexadecimal digits, or leave it out")
        if digest != actual:
            raise UsageError(
                f"csv: {path} has the digest {actual}, not {digest}: it is not the file of that run any more"
            )

    def lay(num_stages: int, num_workers: int) -> Schedule:
        if (num_stages, num_workers) != (schedule.num_stages, schedule.num_workers):
            raise UsageError(
                f"csv: {path} is for {schedule.num_stages} stages on {schedule.num_workers} workers, but there are "
                f"{num_stages} stages on {num_workers} workers: split the model in as many, and leave workers= out"
            )
        return schedule

    return Method(
        name="csv",
        summary="a list of actions from a file",
        schedule=lay,
        synchronous=True,
        workers=lambda _: schedule.num_workers,
        options={"path": str(path), "digest": actual},
    )
