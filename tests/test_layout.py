"""The order of the folders of src/stretto, from the ground up: each imports only those above it in the list."""

import ast
import functools
import graphlib
import importlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from types import ModuleType

import pytest

import stretto
import stretto.replicas.sync_options
from stretto.system.fork_server import NEEDED

ROOT = Path(stretto.__file__).parent
GROUPS = {
    "ground": "errors interrupts options mesh optimizers system trackers",
    "what is done": "schedule methods",
    "one stage's work": "collectives nn data losses heads optim weights parallel replicas tracing stage",
    "interpreters": "simulate checkpoint emulate runtime trainer",
    "on paper": "cost plan",
    "laboratory": "models measure splitting analysis settings report study",
    "doors": "doctor cli lightning transformers",
}
ORDER = [folder for folders in GROUPS.values() for folder in folders.split()]
MOST_CODE_LINES = 60_900  # of src
WITHOUT_TORCH = (
    "options",
    "mesh",
    "optimizers",
    "system",
    "trackers",
    "schedule",
    "methods",
    "settings",
    "cost",
    "plan",
)


def test_every_folder_has_its_place():
    there = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__", "__main__"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


def test_the_design_names_the_groups_in_the_same_order():
    design = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    drawn = design.split("## Folders")[1].split("```")[1]
    assert re.findall(r"^  (\w+)/? ", drawn, flags=re.MULTILINE) == ORDER


@pytest.mark.slow
def test_each_imports_only_what_stands_above_it():
    assert [upward for path in sorted(ROOT.rglob("*.py")) for upward in imports_from_below(path)] == []


def test_an_import_from_below_is_named(tmp_path):
    file = tmp_path / "schedule" / "late.py"
    file.parent.mkdir()
    file.write_text("def run():\n    from stretto.cli.program import main\n    return main\n")
    assert list(imports_from_below(file, tmp_path)) == [
        "schedule/late.py:2: schedule imports stretto.cli.program, but cli stands below it"
    ]


def test_no_files_import_each_other_in_a_circle():
    """Inside functions and for type checkers, too. Packages are left out: they only pass names on."""
    try:
        graphlib.TopologicalSorter(imports_of_files()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


def imports_of_files():
    """The modules that each module imports."""
    files = {
        ".".join(("stretto", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in ROOT.rglob("*.py")
        if path.stem != "__init__"
    }
    graph = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            graph[name] |= files.keys() & {*found} - {name}
    return graph


@pytest.mark.slow
def test_the_house_keeps_to_its_budget_of_code():
    """Whoever passes it says in the commit what a feature replaces, or raises it with the reason in docs/design.md."""
    assert sum(len(code_lines(path)) for path in ROOT.rglob("*.py")) <= MOST_CODE_LINES


def code_lines(path):
    """The numbers of a file's lines that are neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    aside = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in aside:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def imports_from_below(path, root=ROOT):
    """What a file imports anywhere, inside functions too, from a folder that stands below its own."""
    own = path.relative_to(root).parts[0].removesuffix(".py")
    if own.startswith("__"):
        return
    for line, module in imported(ast.parse(path.read_text())):
        other = module.split(".")[1]
        if other in ORDER and ORDER.index(other) > ORDER.index(own):
            yield f"{path.relative_to(root)}:{line}: {own} imports {module}, but {other} stands below it"


def imported(tree):
    """Line and name of the modules of stretto that a file imports, but for those that only a type checker sees."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"stretto.{alias.name}" for alias in node.names] if node.module == "stretto" else [node.module]
        else:
            names = []
        yield from ((node.lineno, name) for name in names if name.startswith("stretto."))


def test_no_module_is_hidden_by_what_its_package_exports():
    """`from stretto.schedule import check` is the function: so no module may be called `check` there."""
    hidden = []
    for init in ROOT.rglob("__init__.py"):
        package = ".".join(("stretto", *init.parent.relative_to(ROOT).parts))
        modules = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        hidden += [
            f"{package}.{name}"
            for name in modules & {*exported(init)}
            if not isinstance(getattr(importlib.import_module(package), name), ModuleType)
        ]
    assert hidden == []


def exported(init):
    """What a file says in `__all__`, which is a list of texts: importing all packages would take seconds."""
    lists = [
        ast.literal_eval(node.value)
        for node in ast.parse(init.read_text()).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    assert len(lists) == len(re.findall(r"^__all__\b", init.read_text(), flags=re.MULTILINE))
    return [name for names in lists for name in names]


@pytest.mark.parametrize("module", NEEDED)
def test_what_the_fork_server_imports_by_name_is_there(module):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_folders_that_import_no_torch(folder):
    assert folder in imported_without_torch()


@functools.cache
def imported_without_torch():
    """The folders that are imported, one after the other in one new process, before torch is."""
    code = f"""
import importlib, sys
for folder in {WITHOUT_TORCH}:
    importlib.import_module(f"stretto.{{folder}}")
    if "torch" in sys.modules:
        break
    print(folder)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_what_the_command_line_opens_first_is_little():
    """`--help` answers within 0.3 s: what a verb works with is imported once the verb runs."""
    code = (
        "import sys, stretto.cli\nprint(*{name.split('.')[1] for name in sys.modules if name.startswith('stretto.')})"
    )
    opened = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*opened.stdout.split()} == {
        "cli",
        "errors",
        "interrupts",
        "mesh",
        "optimizers",
        "options",
        "system",
        "settings",
    }


def test_ways_to_agree_answer_for_themselves():
    """What depends on how replicas stay together is asked of it (`sync.sharding`), not found out by its class."""
    names = {*vars(stretto.replicas.sync_options)["CHOICES"].values()}
    asked = re.compile(rf"isinstance\([^)]*\b({'|'.join(each.__name__ for each in names)})\b")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] != "replicas"
        for line in path.read_text().splitlines()
        if asked.search(line)
    ]
    assert found == []
