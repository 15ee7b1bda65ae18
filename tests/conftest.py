"""Same numbers on every machine: one thread (float64 sums differ between one and two), examples by a printed seed."""

import gc
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of stores whose peers have gone, as in tests they do
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

import costs
import leftovers
import missing_extras

gc.set_threshold(100_000, 20, 20)  # Python's own 700, 10, 10 take a tenth of the CPU of all tests

ROOT = Path(__file__).parent.parent
FEW, MANY = 15, 200  # random examples of a law: in make test from another seed at each commit, in make test-all

settings.register_profile("few", deadline=None, max_examples=FEW, database=None)
settings.register_profile("many", deadline=None, max_examples=MANY)  # those that fail are kept in .hypothesis
settings.load_profile("few")


def pytest_addoption(parser):
    """What `make` asks for (see tests/README.md)."""
    group = parser.getgroup("costs of tests")
    group.addoption("--costs", metavar="FILE", help="write what each test costs, as JSON; with =")
    group.addoption("--compare-cpu", action="store_true", help="fail if CPU is more than twice that in tests/costs.csv")
    group.addoption("--keep-costs", action="store_true", help="write tests/costs.csv and tests/budget.toml anew")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """The process that reports adds up; those that run tests count and watch. Alone, one does both."""
    if not is_worker(config):
        if config.option.hypothesis_seed is None:
            config.option.hypothesis_seed = seed_of_commit()
        config.accounts = costs.Accounts(config)
        config.untidy, config.left = tracked_state(), []
    if is_worker(config) or not config.option.dist or config.option.dist == "no":
        config.counts = tempfile.TemporaryDirectory(prefix="st-counts-")
        config.watch = leftovers.Leftovers()
        config.ledger = costs.Ledger(Path(config.counts.name))
        for plugin in (config.ledger, config.watch, missing_extras.Missing(Path(config.counts.name))):
            config.pluginmanager.register(plugin)


def is_worker(config):
    """Whether this process runs tests for another one, which reports."""
    return hasattr(config, "workerinput")


def seed_of_commit():
    """Another one at each commit, the same in all of them that try it."""
    told = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return str(int(told.stdout[:8] or "0", 16))


def tracked_state():
    """The files of the checkout that git does not know or that have changed."""
    command = ["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=all"]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())


def pytest_sessionfinish(session):
    """Hand what was counted and what is left to the process that reports, or report it."""
    config = session.config
    if hasattr(config, "ledger"):
        from runtime import nursery, worlds  # not in a process that only reports: torch takes a second

        worlds.end_all()
        nursery.close()
        found = {"costs": config.ledger.rows, "leftovers": config.watch.found()}
        config.watch.clear()
        config.counts.cleanup()
        if is_worker(config):
            config.workeroutput.update(found)
        else:
            take(config, found)
    if not is_worker(config):
        config.untidy = tracked_state() - config.untidy
        good = config.accounts.judge(whole=is_whole(session)) and not config.untidy
        if session.exitstatus == pytest.ExitCode.OK and not (good and not config.left):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of --dist loadfile."""
    if config.option.dist == "loadfile":
        from schedulers import TogetherScheduling  # not where xdist is missing

        return TogetherScheduling(config, log)
    return None


def pytest_collection_finish():
    """What was imported and collected lasts until the end: looking for garbage in it again costs much."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """A process has run its tests."""
    take(node.config, getattr(node, "workeroutput", {}))  # none of one that was interrupted


def take(config, found):
    """Add up what a process has found."""
    config.accounts.rows += found.get("costs", [])
    config.left += found.get("leftovers", [])


def is_whole(session):
    """Whether these are all quick tests and no others."""
    option = session.config.option
    everywhere = not session.config.args or [Path(each).resolve() for each in session.config.args] == [ROOT / "tests"]
    chosen = option.keyword or getattr(option, "lf", False)  # without its cache, pytest has no lf
    return everywhere and option.markexpr == "not slow and not docs" and not chosen


def pytest_terminal_summary(terminalreporter, config):
    """What is over its budget, what was left behind, and how the same random examples are drawn again."""
    said = [
        *config.accounts.said,
        *config.left,
        *(f"the tests have changed the checkout: {line}" for line in config.untidy),
    ]
    for line in said:
        terminalreporter.write_line(line, red=True)
    terminalreporter.write_line(f"random examples: --hypothesis-seed={config.option.hypothesis_seed}")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Nobody's own: tests and the processes that they start neither read nor write the user's cache folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _without_vega():
    """Of all pages but one in tests/report: bundling it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.report.html._bundle", lambda: "// Vega")
        yield


@pytest.fixture
def plain_pages(monkeypatch):
    """Pages of studies are their titles: charts take seconds, and are tested elsewhere."""
    from stretto.report.html import write

    monkeypatch.setattr("stretto.study.report_page.build", lambda page, path: write(page.title, path))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte, where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no rights to mount a file system; a test with a patched fsync stands in for it")
    yield place
    subprocess.run(["umount", str(place)], check=True)
