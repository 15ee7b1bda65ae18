"""Training a cell again from nothing but the study and its store: does it fall within its interval?"""

import statistics
from collections.abc import Sequence

from harness.cells import Run, Study
from harness.halving import chosen_rate, final_records
from harness.intervals import interval
from harness.results import Records
from harness.store import Store
from harness.work import make_run


def train_again(study: Study, store: Store, name: str, seeds: Sequence[int], data: str | None) -> int:
    """Train a finished cell at its best rate with these seeds, keep the runs in again.jsonl, and say what it came to.

    Returns 0 if the mean of the last test losses lies in the cell's interval, else 1, as where a seed diverges. Raises
    SystemExit for a cell that is unknown, not finished, or has a seed that diverged.
    """
    names = [cell.name for cell in study.cells]
    if name not in names:
        raise SystemExit(f"no cell of {study.name} is called {name!r}: choose one of\n" + "\n".join(names))
    cell, finished = study.cell(name), store.read()
    records, rate = final_records(cell, finished), chosen_rate(cell, finished)
    losses = [record["curve"][-1][2] for record in records.values() if not record["diverged"]]
    if rate is None or len(losses) < 3:
        raise SystemExit(f"cell {name!r} has {len(losses)} finished seeds that did not diverge, and needs 3")
    known = interval(losses)
    kept = Store(store.path.with_name("again.jsonl"))
    again = []
    for seed in seeds:
        record = make_run(study, Run(cell, rate, seed, cell.steps), data)
        kept.add(record)
        if record["diverged"]:
            print(f"{record['key']}: diverged at step {record['diverged']}, outside the interval {known}", flush=True)
            return 1
        again.append(record["curve"][-1][2])
        print(f"{record['key']}: test loss {again[-1]:.5g}; in the study {_before(records, seed)}", flush=True)
    mean = statistics.fmean(again)
    inside = known.low <= mean <= known.high
    print(f"mean {mean:.5g}, {'within' if inside else 'outside'} the interval {known}")
    return 0 if inside else 1


def _before(records: Records, seed: int) -> str:
    return f"{records[seed]['curve'][-1][2]:.5g}" if seed in records else "not among its seeds"
