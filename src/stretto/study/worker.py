"""One process of a run on several: `python -m stretto.study.worker FILE`, started by stretto.study.job."""

import json
import os
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from stretto.errors import StrettoError
from stretto.study.job import Job
from stretto.study.pool import REPORT_EVERY
from stretto.study.training import run


def main(file: Path) -> None:
    """Do this process's part of the job that `file` describes."""
    follow()
    import torch

    torch.set_num_threads(1)  # as in emulation, so that the numbers are the same
    job: Job = pickle.loads(file.read_bytes())
    try:
        with job.progress.open("w", encoding="ascii") as pipe:
            first, last = os.environ.get("RANK") == "0", 0.0

            def on_step(step: int, loss: float | None) -> None:
                nonlocal last
                if first and (time.monotonic() - last > REPORT_EVERY or step == job.settings.steps):
                    last = time.monotonic()
                    print(step, "" if loss is None else loss, file=pipe, flush=True)

            resume = job.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            run(job.settings, job.folder, on_step, trace=job.trace, costs=job.costs, resume=resume)
    except KeyboardInterrupt as interrupt:
        fail(StrettoError(f"{interrupt}"))
    except Exception as error:  # noqa: BLE001 - whoever started this process says it
        fail(error)


def follow() -> None:
    """From now on, end with the process that started this one."""
    threading.Thread(target=end_with, args=(os.getppid(),), name="stretto-parent", daemon=True).start()


def end_with(parent: int) -> NoReturn:
    """End this process once the one that started it has gone: it cannot tell us any more."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def fail(error: Exception) -> NoReturn:
    """Leave what went wrong where torch's launcher looks for it, and end."""
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    if isinstance(error, StrettoError):
        message = f"{error}{notes}"
    else:
        message = (
            f"worker {os.environ.get('RANK')} failed{notes}\n{''.join(traceback.format_exception(error))}".rstrip()
        )
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        told = {"message": message, "kind": type(error).__name__, "timestamp": str(int(time.time()))}
        Path(place).write_text(json.dumps(told), encoding="utf-8")
    else:
        print(f"stretto: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
