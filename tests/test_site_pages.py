"""That `make docs` finds every page, on a fresh clone: the hooks of the site, without its generator."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GENERATOR = {
    "mkdocs.config.defaults": ["MkDocsConfig"], "mkdocs.exceptions": ["PluginError"],
    "mkdocs.structure.files": ["File", "Files"], "mkdocs.structure.pages": ["Page"],
}  # fmt: skip
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


@pytest.fixture(scope="module")
def hooks():
    with pytest.MonkeyPatch.context() as patch:
        for name, members in GENERATOR.items():
            module = ModuleType(name)
            vars(module).update(dict.fromkeys(members, Exception))
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
        hooks = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hooks)
    return hooks


@pytest.fixture(scope="module")
def pages(hooks):
    """Every page of the site by the path that it has there, as its hooks tell them."""
    return hooks.inside_pages() | hooks.outside_pages()


def test_code_breaks_between_its_words_only(hooks):
    long = "stretto.compare(build, data)  # --model mine.py:network"
    block = f"<pre><span></span><code>{long}</code></pre>"
    told = hooks.on_page_content(f"<code>--tensor</code><code>{long}</code>{block}")
    assert told == (
        '<code class="whole">--tensor</code><code>stretto.<wbr>compare(<wbr>build, data)  # '
        f'<span class="whole">--model</span> mine.<wbr>py:network</code>{block}'
    )
    name = '<span class="doc doc-object-name doc-class-name">'
    assert hooks.on_page_content(f"{name}stretto.mesh_of</span>") == f"{name}stretto.<wbr>mesh_<wbr>of</span>"


@pytest.fixture(scope="module")
def in_git():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    return {(ROOT / name).resolve() for name in listed.stdout.split("\0")}


def test_pages_link_to_pages_and_to_files_of_the_repository(pages, in_git):
    shown = {path.resolve() for path in pages.values()}
    leading = {path for path in in_git if path.suffix != ".md"} | {DOCS / "log.md"} | shown
    wrong = []
    for page in (page for page in shown if page.suffix == ".md"):
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        paths = {link: (page.parent / link).resolve() for link in LINK.findall(text) if "://" not in link}
        wrong += [(page.name, link) for link, path in paths.items() if {path, path / "README.md"}.isdisjoint(leading)]
    assert wrong == []


def test_every_page_is_in_the_navigation_once(pages):
    """The generator leaves no page out without a warning, and with --strict a warning is an error."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    entries = re.findall(r"(\S+\.md)$", nav, re.MULTILINE)
    patterns = [re.compile(re.escape(entry).replace(r"\*", ".*")) for entry in entries]
    assert [page for page in pages if sum(pattern.fullmatch(page) is not None for pattern in patterns) != 1] == []
