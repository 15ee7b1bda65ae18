"""Hooks of the site (mkdocs.yml): pages that lie outside docs/, links to files, and a check of public names.

A page may link to any file of the repository by the path that it has there, so that the link works on a forge, too.
Here such a link is turned into one within the site: READMEs of experiments and benchmarks, and any other Markdown file
that is linked, become pages, an example becomes a page that shows its code, and any other file is copied.
UNPUBLISHED files of docs/ (exclude_docs in mkdocs.yml) are no pages: a link to one leads to its plain text.
"""

import ast
import fnmatch
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "stretto"
UNPUBLISHED = (DOCS / "log.md",)
RENAMED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
PUBLIC_MODULES = ("collectives", "losses", "parallel", "schedule", "optim", "checkpoint", "cost")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#\s])")
FOREIGN = re.compile(
    r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|icon)")[^>]*(?:src|href)="(https?:[^"]+)"'
)
CODE = re.compile(r"(?<!<span></span>)<code>([^<]+)</code>")  # in a line, not in a block
NAME = re.compile(r'(?<=<span class="doc doc-object-name )([^>]*>)([^<]+)')
WHOLE = 32  # characters of code that fit on a line of a narrow screen
BREAK = re.compile(r"(?<=[._(,=/])(?=[\w.])")  # where a longer piece, or a name, may go on in a new line
FLAG, WHOLE_FLAG = re.compile(r"--[\w-]+"), r'<span class="whole">\g<0></span>'
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)

anchors: set[str] = set()  # every id of every page that was built


def public_names() -> list[str]:
    """Every public name with its module, "stretto.Trainer": what `__all__` of the public modules lists."""
    modules = {"stretto": SOURCE / "__init__.py"}
    modules |= {f"stretto.{name}": SOURCE / name / "__init__.py" for name in PUBLIC_MODULES}
    return sorted(f"{module}.{name}" for module, path in modules.items() for name in exported(path))


def exported(path: Path) -> list[str]:
    """`__all__` of a module, read without importing it."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise PluginError(f"{path}: no __all__, so it cannot be said which of its names are public")


def inside_pages() -> dict[str, Path]:
    """The pages that lie in docs/: path in the site to path in the repository."""
    return {path.relative_to(DOCS).as_posix(): path for path in DOCS.glob("**/*.md") if path not in UNPUBLISHED}


def outside_pages() -> dict[str, Path]:
    """The pages that lie outside docs/: path in the site to path in the repository.

    A Markdown file that a page links to is one, too.
    """
    readmes = [
        path
        for folder in ("experiments", "benchmarks", "studies", "examples")
        for path in ROOT.glob(f"{folder}/**/README.md")
    ]
    found = [*readmes, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("examples/**/*.py")]
    waiting = [path for path in (*found, *inside_pages().values()) if path.suffix == ".md"]
    while waiting:
        page = waiting.pop()
        linked = [(page.parent / target).resolve() for target in links(page.read_text())]
        for path in (path / "README.md" if path.is_dir() else path for path in linked):
            if path.suffix == ".md" and path.is_file() and not path.is_relative_to(DOCS) and path not in found:
                found.append(path)
                waiting.append(path)
    return {uri: path for path in sorted(found) if (uri := place(path)) is not None}


def place(path: Path) -> str | None:
    """Where a file or folder of the repository stands in the site; None if it is not part of it."""
    if path.is_dir():
        path = path / "README.md"
    if not path.is_file() or not path.is_relative_to(ROOT):
        return None
    if path in UNPUBLISHED:
        return path.relative_to(DOCS).with_suffix(".txt").as_posix()
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name in RENAMED:
        return RENAMED[name]
    if name.endswith("/README.md"):  # experiments/delay.md: a section may have one index.html
        return name.removesuffix("/README.md") + ".md"
    return re.sub(r"^(examples/.*)\.py$", r"\1.md", name)


def links(text: str) -> Iterator[str]:
    """The targets of a page's links and pictures within the repository."""
    for target in LINK.findall(FENCE.sub("", text)):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def expanded(entries: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with every glob replaced by the pages that it matches, an index first."""
    items: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            if isinstance(inside, list):
                items.append({title: expanded(inside, pages)})
            elif "*" in inside:
                items.append(
                    {
                        title: sorted(
                            fnmatch.filter(pages, inside),
                            key=lambda page: ("README" not in page, page.removesuffix(".md")),
                        )
                    }
                )
            else:
                items.append(entry)
        else:
            items.append(entry)
    return items


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the globs of the navigation."""
    config.nav = expanded(config.nav or [], [*inside_pages(), *outside_pages()])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and every file that a page links to."""
    anchors.clear()
    for uri, path in outside_pages().items():
        if path.suffix == ".py":
            files.append(
                File.generated(
                    config,
                    uri,
                    content=f"# {path.relative_to(ROOT / 'examples')}\n\n```python\n{path.read_text()}```\n",
                )
            )
        else:
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for page in files.documentation_pages():
        source = page.abs_src_path
        if source is None:
            continue
        for target in links(Path(source).read_text()):
            path = (Path(source).parent / target).resolve()
            copy = place(path)
            if copy is not None and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links within the site."""
    source = page.file.abs_src_path
    if source is None:
        return markdown

    def within_site(match: re.Match[str]) -> str:
        target = match[0]
        uri = None if "://" in target else place((Path(source).parent / target).resolve())
        return target if uri is None else posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)  # odd parts are code
    return "".join(part if index % 2 else LINK.sub(within_site, part) for index, part in enumerate(parts))


def on_page_content(html: str, **_: Any) -> str:
    """Note the ids of a page, by which the check below knows what is documented; say where code may break."""
    anchors.update(re.findall(r'\bid="([^"]+)"', html))
    html = CODE.sub(lambda code: with_breaks(code[1]), html)
    return NAME.sub(lambda name: name[1] + BREAK.sub("<wbr>", name[2]), html)


def with_breaks(code: str) -> str:
    """An element for code in a line, which stays on one line if it is short; flags always do."""
    if len(code) <= WHOLE:
        return f'<code class="whole">{code}</code>'
    return f"<code>{FLAG.sub(WHOLE_FLAG, BREAK.sub('<wbr>', code))}</code>"


def on_post_page(output: str, *, page: Page, **_: Any) -> None:
    """Fail if a page would load anything from another host."""
    if loaded := FOREIGN.findall(output):
        raise PluginError(f"{page.file.src_uri} loads {', '.join(loaded)}: a page must work without a network")


def on_post_build(**_: Any) -> None:
    """Fail if a public name has no entry on any page."""
    missing = [name for name in public_names() if name not in anchors]
    if missing:
        raise PluginError(f"public names without an entry on a page of docs/api: {', '.join(missing)}")
