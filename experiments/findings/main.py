"""Make the runs of a study and write its page: see README.md in this folder.

OMP_NUM_THREADS=1 python experiments/findings/main.py depth --data FOLDER [--jobs 2]
OMP_NUM_THREADS=1 python experiments/findings/main.py lecture --launch
python experiments/findings/main.py advice
python experiments/findings/main.py gallery
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # also in the processes that this one starts

from harness.advice import ends_near_zero, entries, table, words, write_findings  # noqa: E402
from harness.again import train_again  # noqa: E402
from harness.cells import Record, Study  # noqa: E402
from harness.halving import next_runs, runs_left  # noqa: E402
from harness.launches import launches_left, make_launches  # noqa: E402
from harness.markdown import write_between  # noqa: E402
from harness.page import write_page  # noqa: E402
from harness.store import Store  # noqa: E402
from harness.work import work  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

from stretto.methods.findings import Finding  # noqa: E402

PAGES = HERE / "pages"
FINDINGS = HERE.parents[1] / "src/stretto/methods/findings.json"
PAGE, GALLERY = (HERE.parents[1] / "docs" / name for name in ("which-method.md", "gallery.md"))
README = HERE.parents[1] / "README.md"
ADVISING = (
    ("depth", "a decoder of 32 thin blocks", None, None),
    ("depth_ideas", "a decoder of 32 thin blocks", None, None),
    ("heads", "a decoder of 8 blocks", 8, None),
    ("slides", "ResNet-20, batches of 8", 34, {"task": "digits"}),
    ("local_updates", "a decoder of 8 blocks, rates constant", 8, {"network": "decoder"}),
    ("local_updates", "an MLP of 8 layers", 8, {"network": "mlp", "width": 1024, "batch": 64}),
    ("local_updates", "ResNet-20", 9, {"network": "resnet"}),
)


def study_called(name: str) -> Study:
    """The study in the file of this name beside this one. Raises SystemExit for an unknown one."""
    known = sorted(path.stem for path in HERE.glob("*.py") if path != Path(__file__))
    if name not in known:
        raise SystemExit(f"no study is called {name!r}: choose one of {', '.join(known)}")
    study: Study = importlib.import_module(name).STUDY
    return study


def work_at(_: int, name: str, folder: str, data: str | None, jobs: int, only: str) -> None:
    """One of several processes at a study."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work(study_called(name), Store(Path(folder) / "runs.jsonl"), data, jobs, only)


def write_advice() -> str:
    """Write what the package's advice rests on, and its table for users; say what it has."""
    found = []
    for name, *of in ADVISING:
        found += entries(study_called(name), Store(PAGES / name / "runs.jsonl").read(), *of)
    write_findings(FINDINGS, found)
    known = [Finding(**entry) for entry in found]
    write_between(PAGE, "advice", table(known, networks_near_zero()))
    for page in (PAGE, README):
        write_between(page, "words", words(known), blank="")
    return f"{FINDINGS.name}: {len(found)} methods of {', '.join(dict.fromkeys(name for name, *_ in ADVISING))}"


def networks_near_zero() -> set[str]:
    """The networks of the advice whose losses end near 0."""
    return {
        network for name, network, _, where in ADVISING if ends_near_zero(study_called(name), stores_of(name)[0], where)
    }


def write_gallery() -> str:
    """Write the verdicts of the gallery from all stores; say how many studies they are of."""
    from sections.gallery import CARDS, gallery

    stores = {study.name: stores_of(study.name) for card in CARDS for study in card.studies}
    write_between(GALLERY, "findings", gallery(stores))
    return f"{GALLERY.name}: verdicts of {len(stores)} studies"


def stores_of(name: str) -> tuple[dict[str, Record], dict[str, Record]]:
    """A study's finished runs and launches, by key."""
    return Store(PAGES / name / "runs.jsonl").read(), Store(PAGES / name / "launches.jsonl").read()


def main() -> None:
    """Make what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "study",
        help="the name of a file beside this one, without .py; or advice: from all runs that there are, write the file "
        "of the package that method='async', 'local' and plans rest on; or gallery: the verdicts of docs/gallery.md",
    )
    parser.add_argument("--data", help="the folder with the study's data; its own default unless given")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a process of one thread each")
    parser.add_argument("--out", type=Path, help="the folder of runs.jsonl and the page; pages/STUDY unless given")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="make the runs, or launches, with TEXT in their name"
    )
    parser.add_argument("--page", action="store_true", help="write the page from what there is, make no runs")
    parser.add_argument("--list", action="store_true", help="say which runs could be made now, make none")
    parser.add_argument("--launch", action="store_true", help="make the timed launches instead of runs")
    parser.add_argument("--noisy", action="store_true", help="with --launch: wait for no quiet machine, mark the times")
    parser.add_argument("--steps", type=int, help="with --launch: so many timed steps; for a smoke run, with --out")
    parser.add_argument("--again", metavar="CELL", help="train a cell's best rate again: is it in its interval?")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --again")
    chosen = parser.parse_args()
    if chosen.jobs < 1:
        parser.error(f"--jobs {chosen.jobs}: at least 1")
    if chosen.study == "advice":
        print(write_advice())
        return
    if chosen.study == "gallery":
        print(write_gallery())
        return
    study = study_called(chosen.study)
    if chosen.data is not None and not study.needs_data:
        parser.error(f"--data {chosen.data}: study {study.name} makes its own data; leave --data out")
    folder = chosen.out or PAGES / study.name
    store, launches = Store(folder / "runs.jsonl"), Store(folder / "launches.jsonl")
    if chosen.again:
        sys.exit(train_again(study, store, chosen.again, chosen.seeds, chosen.data))
    if chosen.list:
        print(*(run.key for run in next_runs(study, store.read())), sep="\n")
        print(f"{len(store.read())} runs finished, {len(runs_left(study, store.read()))} left")
        if study.launches:
            left = launches_left(study.launches, launches.read())
            print(f"{len(study.launches) - len(left)} launches finished on a quiet machine, {len(left)} left")
        return
    if chosen.launch:
        _launch(study, launches, chosen)
    elif not chosen.page:
        _make_runs(study, store, chosen)
    print(write_page(study, store.read(), folder, launches.read()))


def _launch(study: Study, store: Store, chosen: argparse.Namespace) -> None:
    if not study.launches:
        raise SystemExit(f"study {study.name} has no timed launches: leave --launch out")
    wanted = [each for each in study.launches if chosen.only in each.key]
    with _interruptible(store, "launches"):
        make_launches(wanted, store, noisy=chosen.noisy, steps=chosen.steps)


def _make_runs(study: Study, store: Store, chosen: argparse.Namespace) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    left = len(runs_left(study, store.read()))
    print(f"{study.name}: {len(store.read())} runs finished, {left} left", file=sys.stderr, flush=True)
    with _interruptible(store, "runs"):
        if chosen.jobs == 1:
            work(study, store, chosen.data, 1, chosen.only)
        else:
            arguments = (study.name, str(store.path.parent), chosen.data, chosen.jobs, chosen.only)
            spawn(work_at, arguments, nprocs=chosen.jobs, daemon=True)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _interruptible(store: Store, what: str) -> Iterator[None]:
    """Where SIGTERM and Ctrl-C end the command, which says how to go on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted: {len(store.read())} {what} are in {store.path}; the same command goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
