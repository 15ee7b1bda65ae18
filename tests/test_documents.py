"""What the documents show must run as it stands."""

import ast
import contextlib
import io
import json
import re
import shlex
import sys
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path

import pytest

import stretto
from pages import write_files
from runtime.processes import start
from stretto.cli import main

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent
METHOD_PAGES = ROOT / "docs" / "methods"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(page, found, fewer=()):
    """Run every block of a page in order: Python in one namespace, commands as they are typed, output as shown.

    `fewer` are (as it stands, less of it), of what takes long.
    """
    text = page.read_text()
    for before, after in fewer:
        assert before in text
        text = text.replace(before, after)
    for language, block in FENCED.findall(text):
        if language == "python":
            exec(compile(block, str(page), "exec"), found)
        elif language not in ("text", "diff"):  # what is shown and not run; test_site.py looks at its commands
            assert language == "console", f"{page.name}: a block of {language!r} is run by nobody"
            for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                typed, _, shown = command.partition("\n")
                said = "".join(f"{line.rstrip()}\n" for line in typed_in(typed).strip().splitlines())
                assert OutputChecker().check_output(shown.strip() + "\n", said, ELLIPSIS) or not shown.strip(), said


def typed_in(command):
    """What a command says on stdout. The processes of torchrun are forks: it would only set their environment."""
    name, *words = shlex.split(command)
    if name == "torchrun":
        processes = start(int(words[words.index("--nproc-per-node") + 1]), [sys.executable, words[-1]])
        told = [process.communicate(timeout=120) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(told), told
        return "".join(out for out, _ in told)
    assert name == "stretto", command
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(words) == (words[0] == "diagnose"), command  # whose page shows a mistake that it finds: status 1
    return out.getvalue()


def test_the_readmes_example_runs(capsys, tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), found)
    assert isinstance(found["trainer"], stretto.Trainer)
    assert 0 < found["loss"] < 1.4  # below chance among four classes
    told = capsys.readouterr().out
    assert "'accuracy'" in told
    (tmp_path / "script.py").write_text(block)  # and on processes, with the same numbers
    processes = typed_in(f"torchrun --nproc-per-node 4 {tmp_path / 'script.py'}")
    assert processes.count(told.partition("}")[0]) == 4


def test_the_readmes_picture_is_what_show_draws():
    from stretto.schedule import draw
    from stretto.simulate import simulate

    drawn = draw.text(simulate(*stretto.method("overlapping").plan(3), 3).spans)
    assert drawn in (ROOT / "README.md").read_text()


FIFTHS = {"own_network": {"300": "60"}, "hugging_face": {"201": "41", "50": "10"}}


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_run(example, capsys):
    """All that they do, in a fifth of their steps: of training, of learning rates and between evaluations."""
    text = example.read_text()
    for number, fifth in FIFTHS.get(example.stem, {}).items():
        text, count = re.subn(rf"\b{number}\b", fifth, text)
        assert count
    exec(compile(text, str(example), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.count("accuracy") == 4


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells in order, in one namespace and process, in a tenth of their steps; what stands last in a cell is shown.

    No Jupyter takes part: what a notebook shows of a study is what it gives as HTML.
    """
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples" / "own_problem.ipynb").read_text())["cells"]
    found: dict[str, object] = {"__name__": "__main__"}
    shown = []
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            text = re.sub(r"steps=(\d+)00", r"steps=\g<1>0", "".join(cell["source"])).replace(
                "seeds=2", "seeds=2, jobs=1"
            )
            tree = ast.parse(text)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<cell>", "exec"), found)
            if last is not None:
                shown.append(eval(compile(ast.Expression(last.value), "<cell>", "eval"), found))
    study, run, validation_maes = [value for value in shown if value is not None]
    assert study.failed == {}
    assert len(study.runs) == 8
    html = study._repr_html_()
    assert html.startswith("<pre>")
    assert "overlapping" in html
    assert "<svg" in html
    assert found["by_hand"] == pytest.approx(run["test_mae"], rel=1e-5)
    assert "test_mae" in repr(run)
    assert len(validation_maes) == 8


@pytest.mark.parametrize("page", sorted(METHOD_PAGES.glob("*.md")), ids=lambda path: path.stem)
def test_the_pages_of_methods_are_true(page):
    found: dict[str, object] = {}
    run(METHOD_PAGES / "README.md", found)
    if page.name != "README.md":
        run(page, found)


def test_every_method_has_a_page():
    from stretto.methods import METHODS

    index = (METHOD_PAGES / "README.md").read_text()
    titles = " ".join(page.read_text().split("\n", 1)[0] for page in METHOD_PAGES.glob("*.md"))
    assert [name for name in METHODS if name not in re.findall(r"[\w-]+", titles)] == []
    assert [
        page.name for page in METHOD_PAGES.glob("*.md") if page.name != "README.md" and page.name not in index
    ] == []


def test_the_tutorial_is_true(tmp_path, monkeypatch):
    """Its files are written where it says, its commands are run; its last part makes a tenth of the steps."""
    page = ROOT / "docs" / "tutorial.md"
    steps, fewer, train = "\nfor step in range(200):", "\nfor step in range(20):", tmp_path / "train.py"
    with files_of(page, tmp_path, monkeypatch) as files:
        assert "train.py" in files
        train.write_text(train.read_text().replace(steps, fewer))
        run(page, {}, [(steps, fewer)])


@contextlib.contextmanager
def files_of(page, folder, monkeypatch):
    """The files that a page shows lie in the folder, which is the current one, and can be imported in this block."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    loaded = set(sys.modules)
    try:
        yield write_files(page, folder)
    finally:
        for name in set(sys.modules) - loaded:  # its own files alone, as `network` is what others call theirs
            if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(folder):
                del sys.modules[name]


FEWER = {
    "own-model": [("steps=200", "steps=80, seeds=1, jobs=1"), ('optimizer="adamw"', 'optimizer="adamw", steps=20')]
}


@pytest.mark.parametrize(
    "page",
    sorted(
        [*(ROOT / "docs").glob("guide/*.md"), *(ROOT / "docs").glob("concepts/*.md"), ROOT / "docs/which-method.md"]
    ),
    ids=lambda path: path.stem,
)
def test_the_pages_of_the_guide_are_true(page, tmp_path, monkeypatch):
    with files_of(page, tmp_path, monkeypatch):
        run(page, {}, FEWER.get(page.stem, ()))


def test_every_method_is_named_in_the_readme():
    text = (ROOT / "README.md").read_text()
    from stretto.methods import METHODS

    assert [name for name in METHODS if f"`{name}" not in text] == []
