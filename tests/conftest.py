"""Same numbers on every machine: one thread (float64 sums differ between one and two), no random examples."""

import os
import shutil
import signal
import subprocess

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background; some tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

settings.register_profile("stretto", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("stretto")


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
