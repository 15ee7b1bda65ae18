"""The variables of pages, from folders of runs that an earlier version left, and of a plan's page."""

import contextlib
import dataclasses
import io
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from recorded.plans import SETTINGS

ARCHIVE = Path(__file__).parent / "formats" / "format-3.tar.xz"
PAGES: Mapping[str, tuple[str, ...]] = {
    "a study": ("report", "{left}/compare"),
    "a traced run": ("report", "{left}/train"),
    "a traced run on a cluster": ("report", "{left}/train", "--cluster", "16-workstations"),
    "a study inspected": ("inspect", "{left}/compare"),
    "a run inspected": ("inspect", "{left}/train"),
    "a plan at scale": ("plan", *SETTINGS[-1], "--out", "{left}/plan.toml"),
}


def variables(name: str) -> dict[str, Any]:
    """What the template of a page is given, as plain data; without the program that draws charts."""
    import jinja2

    import stretto.cli

    given: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as left:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(left, filter="data")
        words = [word.replace("{left}", left) for word in PAGES[name]]
        render = jinja2.Template.render

        def remembered(template: jinja2.Template, *args: Any, **shown: Any) -> str:
            given.append(plain({key: value for key, value in shown.items() if key != "bundle"}, left))
            return render(template, *args, **shown)

        with mock.patch.object(jinja2.Template, "render", remembered), contextlib.redirect_stdout(io.StringIO()):
            if stretto.cli.main(words) != 0:
                raise RuntimeError(f"{' '.join(words)} failed")
    [shown] = given
    return shown


def plain(value: Any, left: str) -> Any:
    """Numbers, texts, lists and dicts of a value, without the folder's name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each, left) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each, left) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).replace(left, "{left}")
