"""The site's pages without its generator: names, links, drawings and commands. `make docs` builds it strictly."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import stretto
from hugging_face_models import SMALL, TEXT
from pages import write_files
from pairwise import slow_where
from stretto.cli import main

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.glob("**/*.md")),
    *sorted(
        path
        for folder in ("experiments", "benchmarks", "studies", "examples")
        for path in ROOT.glob(f"{folder}/**/README.md")
    ),
]
HOOKS = (ROOT / "scripts" / "site_hooks.py").read_text()  # imports the generator, which is not there
MODULES = ast.literal_eval(re.search(r"^PUBLIC_MODULES = (.*)$", HOOKS, re.MULTILINE)[1])
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def drawings():
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "scripts" / "drawings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_an_entry():
    """Either its own line in a page of docs/api, or the line of its module, which shows all that `__all__` lists."""
    entries = {entry for page in DOCS.glob("api/*.md") for entry in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}
    assert [name for name in stretto.__all__ if not {f"stretto.{name}", f"stretto.{name}.all_reduce"} & entries] == []
    for name in MODULES:
        module = importlib.import_module(f"stretto.{name}")
        assert module.__all__
        assert f"stretto.{name}" in entries
    for entry in entries:
        module, _, attribute = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"{entry} is on a page and does not exist"


def anchors(page):
    """The anchors of a page's headings, as forges and the site make them."""
    text = FENCED.sub("", page.read_text())
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {link}"
        if anchor and path.suffix == ".md" and "." not in anchor:
            assert anchor in anchors(path), f"{name_of(page)} links to {link}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_no_page_loads_from_elsewhere():
    """Pictures are files of the repository, and the theme takes no fonts from the web."""
    for page in PAGES:
        assert re.findall(r"!\[[^]]*\]\(https?:|<(?:script|img|link)\b", FENCED.sub("", page.read_text())) == [], page
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("name", [draw.__name__ for draw in drawings().DRAWINGS])
def test_drawings_are_those_of_the_schedules(name):
    assert (DOCS / "drawings" / f"{name}.svg").read_text() == getattr(drawings(), name)(), "python scripts/drawings.py"


def texts_in(file):
    """The text of each string in a Python file; what is put into it is a 0 byte, or a text of this file."""
    tree = ast.parse(file.read_text())
    known = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = node.value

    def text(node):
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        inside = node.value if isinstance(node, ast.FormattedValue) else None
        return text(known[inside.id]) if isinstance(inside, ast.Name) and inside.id in known else "\0"

    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [text(n) for n in ast.walk(tree) if isinstance(n, ast.Constant | ast.JoinedStr) and n not in docstrings]


QUOTED = [
    quote
    for bold in re.findall(r"^\*\*(\".*?\")\.?\*\*", (DOCS / "troubleshooting.md").read_text(), re.M)
    for quote in re.findall(r'"([^"]+)"', bold)
]


@pytest.fixture(scope="module")
def messages():
    return [text for file in (ROOT / "src").glob("**/*.py") for text in texts_in(file)]


@pytest.mark.parametrize("quote", QUOTED)
def test_messages_on_the_page_of_troubles_are_those_of_the_code(quote, messages):
    """Three dots stand for whatever a message says there."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in quote.split("...")), re.DOTALL)
    assert any(pattern.search(text) for text in messages)


def test_every_picture_is_on_a_page():
    shown = {
        (page.parent / link).resolve() for page in PAGES for link in LINK.findall(page.read_text()) if ".svg" in link
    }
    assert {path for folder in ("drawings", "pictures") for path in (DOCS / folder).glob("*.svg")} - shown == set()


def shown_commands():
    """Commands of `text` blocks that need no file of the reader's; the remark after them begins after two spaces."""
    for page in PAGES:  # those of examples have data of their own: test_projects.py
        for language, block in () if "examples" in page.parts else FENCED.findall(page.read_text()):
            for line in block.splitlines() if language == "text" else ():
                command = re.split(r"\s{2,}|\s+#", line.strip())[0]
                if command.startswith("stretto ") and not re.search(
                    r"my-study|(?<!/)\b(study|cluster)\.toml|mine\.csv|\.\.\.", command
                ):
                    yield command


LARGE = re.compile(
    r"studies/(local-updates-(06b|08|10)|pipemare-(imagenet|iwslt14))\.toml|train --model hf:"
)  # each method is tried


@pytest.mark.parametrize("command", slow_where(LARGE.search, sorted(set(shown_commands()))))
def test_commands_are_understood(command, tmp_path, monkeypatch, capsys):
    """`train` and `compare` say what they would do; `show` and `simulate` do it; of the others their verb exists."""
    for folder in ("studies", "experiments"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "guide" / "own-model.md"):
        write_files(page, tmp_path)
    if "hf:llama" in command:
        import transformers

        config = transformers.LlamaConfig(
            **{**TEXT, **SMALL, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 256}
        )
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)[1:]
    if words[0] in ("train", "compare"):
        words.append("--dry-run")
    elif words[0] not in ("show", "simulate"):
        words = [words[0], "--help"]
    status, said = main(words), capsys.readouterr().err
    assert status == 0 or ("cifar10" in command and "fetch https://" in said), said
