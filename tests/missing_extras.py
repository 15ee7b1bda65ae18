"""What needs a package that is not installed is skipped, by name: every package but those of a plain installation."""

import importlib.abc
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import costs

PACKAGES = {  # by the name under which a package is imported: how it is installed
    "PIL": "stretto[images]",
    "accelerate": "stretto[transformers]",
    "altair": "stretto[report]",
    "datasets": "stretto[saved]",
    "google": "protobuf",
    "jinja2": "stretto[report]",
    "lightning": "stretto[lightning]",
    "mlflow": "mlflow-skinny",
    "numba": "stretto[fast]",
    "optuna": "stretto[sweep]",
    "peft": "peft",
    "perfetto": "stretto[trace]",
    "sacrebleu": "stretto[translation]",
    "scipy": "scipy",
    "simpy": "simpy",
    "sklearn": "scikit-learn",
    "sqlalchemy": "stretto[sweep]",
    "tensorboard": "tensorboard",
    "tokenizers": "stretto[text]",
    "transformers": "stretto[transformers]",
    "vl_convert": "stretto[report]",
    "wandb": "wandb",
    "yaml": "pyyaml",
}
NOTED = "lacking"  # the file to which each lack adds a byte


ROOT = str(Path(__file__).parents[1])


class Seeker(importlib.abc.MetaPathFinder):
    """Comes last: notes in this process and its forks when our code looks for a package and there is none."""

    def __init__(self):
        self.lacking = {*lacking()}

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.lacking and of_ours(sys._getframe(1)):
            costs.count(NOTED)


def of_ours(frame):
    """Whether the innermost code that is none of importlib's is this project's."""
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(ROOT) and ".venv" not in frame.f_code.co_filename


def note_lacks():
    """Note lacks from now on."""
    sys.meta_path.append(Seeker())


class Missing:
    """Turns failures for want of a package into skipped tests, in this process of pytest."""

    def __init__(self, folder):
        self.noted, self.before = folder / NOTED, 0
        self.noted.touch()
        note_lacks()

    def pytest_runtest_setup(self):
        self.before = self.noted.stat().st_size

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            self._judge(report, call.excinfo, item)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        if report.failed and isinstance(collector, pytest.Module):
            for name in re.findall(r"ImportError: .*|ModuleNotFoundError: .*", str(report.longrepr))[-1:]:
                for package in lacking():
                    if re.search(rf"(No module named|from) '{package}[.']", name):
                        skip(report, collector.path, package)
        return report

    def _judge(self, report, raised, item):
        wanted = getattr(raised.value, "name", None) if raised.errisinstance(ImportError) else None
        name = (wanted or "").partition(".")[0]
        if name in lacking():
            skip(report, item.path, name)
        elif self.noted.stat().st_size > self.before:
            skip(report, item.path, *lacking())


def lacking():
    """The packages that are not installed; two folders of tests have names of packages, and no origin."""
    specs = {name: find_spec(name) for name in PACKAGES}
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]


def skip(report, path, *names):
    """Say so instead of failing."""
    how = " or ".join(f'pip install "{PACKAGES[name]}"' for name in names[:1])
    report.outcome = "skipped"
    report.longrepr = (str(path), 0, f"Skipped: needs {', '.join(names)}, not installed here ({how})")
