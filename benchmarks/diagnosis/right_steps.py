"""Whether `stretto.diagnose` raises a false alarm: right steps of real trainers, each judged with its options.

python benchmarks/diagnosis/right_steps.py                 all of them; writes right_steps.json
python benchmarks/diagnosis/right_steps.py --only FSDP2    those whose trainer or network holds a text, printed alone

Some trainers take a step that is not that of the whole batch, by design: those are groups of their own, and are right
where the answer names what they do.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from right_cases import CASES, Right
from right_networks import right_setup
from two_processes import SIZE

from stretto.analysis.diagnosis.api import diagnose

HERE = Path(__file__).resolve().parent


def stepped(case: Right, rank: int | None = None) -> dict[str, Any]:
    """What a trainer came to; what it prints is left out."""
    s = right_setup(case.network, case.dtype, case.seed)
    arguments = (s,) if rank is None else (s, rank)
    with contextlib.redirect_stdout(io.StringIO()):
        return case.trainer(*arguments, **case.how)


def in_process(rank: int, numbers: list[int], folder: str, port: int) -> None:
    """Take the steps of the cases with these numbers, as one of the processes."""
    prepare()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=SIZE)
    for number in numbers:
        torch.save(stepped(CASES[number], rank), Path(folder) / f"{number}-{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


def prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # of trainers, which tell of their machine


def on_two(numbers: list[int]) -> dict[int, dict[str, Any]]:
    """The steps that two processes take, by the number of their case: what both tell, joined."""
    if not numbers:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(in_process, (numbers, folder, port), nprocs=SIZE)  # type: ignore[no-untyped-call]
        made = {}
        for number in numbers:
            one, other = (torch.load(Path(folder) / f"{number}-{rank}.pt") for rank in range(SIZE))
            made[number] = {kind: one[kind] | other[kind] for kind in one}
    return made


def judged(case: Right, told: dict[str, Any]) -> dict[str, Any]:
    """The answer to a step, and whether it is the one that is right."""
    s = right_setup(case.network, case.dtype, case.seed)
    row: dict[str, Any] = {
        "group": case.group,
        "trainer": case.name,
        "how": {key: in_words(value) for key, value in case.how.items()},
        "network": case.network,
        "dtype": in_words(case.dtype),
        "seed": case.seed,
        "options": {key: in_words(value) for key, value in case.options.items()},
    }
    began = time.perf_counter()
    try:
        answer = diagnose(s.model, (s.inputs, s.target), s.loss, **told, **case.options)
    except Exception as error:  # noqa: BLE001 - a right step that is refused, or ends in an error, is a finding
        return row | {"verdict": "raised", "as expected": False, "sentence": f"{type(error).__name__}: {error}"}
    row["seconds"] = round(time.perf_counter() - began, 2)
    row["verdict"], row["named"] = answer.verdict, [each.name for each in answer.hypotheses]
    row["worst, of the tolerance"] = round(max(each.error for each in answer.rows) / answer.tolerance, 4)
    row["as expected"] = answer.verdict == "equal" if case.group == "equal" else case.group in row["named"]
    return row if answer.verdict == "equal" else row | {"sentence": answer.sentence}


def in_words(value: Any) -> str:
    """A value as a file may have it, the same on every machine."""
    if isinstance(value, partial):
        return f"{value.func.__name__}({', '.join(f'{key}={each}' for key, each in value.keywords.items())})"
    return str(value).removeprefix("torch.")


def shown(rows: list[dict[str, Any]]) -> None:
    """Counts by trainer, dtype and verdict, then each step that is not equal."""
    counts = Counter((row["group"], row["trainer"], row["dtype"], row["verdict"]) for row in rows)
    for (group, trainer, dtype, verdict), number in sorted(counts.items()):
        print(f"{group:26} {trainer:34} {dtype:9} {verdict:12} {number:4}")
    for row in rows:
        if row["verdict"] != "equal":
            mark = " " if row["as expected"] else "X"
            how = " ".join(f"{key}={value}" for key, value in row["how"].items())
            print(
                f"{mark} {row['trainer']} {row['network']} {row['dtype']} seed {row['seed']} {how}: {row['sentence']}"
            )
    alone = [row for row in rows if row["group"] == "equal"]
    equal = sum(row["verdict"] == "equal" for row in alone)
    others = [row for row in rows if row["group"] != "equal"]
    print(f"equal: {equal} of {len(alone)}; of {len(others)} others {sum(row['as expected'] for row in others)} named")


def main() -> int:
    """Take the steps, judge them, print and write the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    prepare()
    chosen = [number for number, case in enumerate(CASES) if given.only in f"{case.name} {case.network} {case.group}"]
    made = on_two([number for number in chosen if CASES[number].processes == SIZE])
    rows = [judged(CASES[number], made.get(number) or stepped(CASES[number])) for number in chosen]
    shown(rows)
    if not given.only:
        counts = Counter((row["group"], row["trainer"], row["dtype"], row["verdict"]) for row in rows)
        names = ("group", "trainer", "dtype", "verdict", "steps")
        table = [dict(zip(names, (*key, number), strict=True)) for key, number in sorted(counts.items())]
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        result = {"machine": machine, "counts": table, "steps": rows}
        (HERE / "right_steps.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
