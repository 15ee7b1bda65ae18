"""The report: one HTML file that holds its data, its charts and the program that draws them."""

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.options.extras import require
from stretto.report.page import Page
from stretto.system.destinations import replacing, write_whole

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def build(page: Page, path: str | Path) -> Path:
    """Write the report to `path` and return it; a file that is there is replaced once the new one is complete.

    Its first frontier stands beside it as frontier.svg and frontier.png, if it has several runs to show and the study
    is not being made just now; the page links to them. The page loads nothing from elsewhere: its content security
    policy forbids it.
    """
    text = render(page)
    from stretto.report.frontier import pictures

    for name, content in ({} if page.progress or page.single else pictures(page)).items():
        with replacing(Path(path).with_name(name)) as temporary:
            temporary.write_bytes(content)
    return write(text, path)


def write(text: str, path: str | Path) -> Path:
    """Write a file whole or not at all, and return its path; folders are made as needed."""
    target = Path(path)
    write_whole(target, text)
    return target


def render(page: Page) -> str:
    """Return the whole page as text. Raises UsageError without the extra "report"."""
    require("report", "a page with charts")
    from stretto.report.page_sections import view

    return fill("page.html.j2", view(page))


def fill(template: str, shown: dict[str, Any]) -> str:
    """Render a template of this folder. `shown` are its variables, of which `specs` holds the charts and their data."""
    require("report", "a page with charts")
    from markupsafe import Markup

    specs = shown.pop("specs")
    return (
        _templates()
        .get_template(template)
        .render(**shown, charts=Markup(_script_json(specs)), bundle=Markup(_bundle() if specs["charts"] else ""))
    )


@cache
def _templates() -> "Environment":
    """The templates of this folder, each compiled once."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: files("stretto.report").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["flags"] = flags
    return environment


def flags(text: str) -> "Markup":
    """A text as HTML, in which flags stay on one line."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"--[\w-]+", r"<code>\g<0></code>", str(escape(text))))


def _script_json(data: Any) -> str:
    """JSON that is safe inside a <script> element: no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed as one script, of the version that altair writes its charts for."""
    import vl_convert
    from altair import SCHEMA_VERSION

    wanted = ".".join(SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known = vl_convert.get_vegalite_versions()
    version = wanted if wanted in known else known[-1]
    # the stub declares `snippet` without its default
    script = str(vl_convert.javascript_bundle(vl_version=version))  # type: ignore[call-arg]
    assert "</script" not in script.lower()
    return script
