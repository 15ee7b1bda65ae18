"""Draws ten faults by a seed, with Cosmic Ray: at least one in each area."""

import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from mutations.faults import HERE, ROOT, STRUCK, Fault, as_toml, excerpts, read

COSMIC_RAY = "cosmic-ray==8.7.0"
PLACE = ROOT / "build" / "mutations"
AREAS = {
    "schedules": ["schedule/library/*.py"],
    "rules": ["schedule/*.py"],
    "weights": ["weights/*.py"],
    "runtime": ["runtime/**/*.py"],
    "losses": ["losses/*.py"],
    "fit": ["trainer/fit.py", "trainer/feed.py"],
    "report": ["report/*.py"],
    "planner": ["plan/*.py"],
}
DRAWN_IN_ALL = 10
SPEAKERS = {"warn", "say", "print", "add_note", "refuse"}  # what these are given is text for people
LOOKS = {
    "angle", "baseline", "cornerRadius", "dx", "dy", "fontSize", "height", "labelLimit", "labelPadding", "minExtent",
    "offset", "opacity", "padding", "size", "strokeDash", "strokeWidth", "tickCount", "titlePadding", "width",
}  # fmt: skip

Place = tuple[int, int]  # line, from 1 on, and column


class Mutation(NamedTuple):
    """One of Cosmic Ray's mutations: its file from the root on, its operator, and which of those in the file."""

    file: str
    operator: str
    occurrence: int
    start: Place
    end: Place


class CosmicRay:
    """Cosmic Ray in an environment of its own, which is made once."""

    @cached_property
    def python(self) -> Path:
        """Its interpreter."""
        folder = PLACE / COSMIC_RAY.replace("==", "-")
        python = folder / "bin" / "python"
        if not (folder / "ready").exists():
            venv.EnvBuilder(with_pip=True, clear=True).create(folder)
            subprocess.run([python, "-m", "pip", "install", "--quiet", COSMIC_RAY], check=True)
            (folder / "ready").touch()
        return python

    def mutations(self, files: Sequence[str]) -> list[Mutation]:
        """All mutations of these files."""
        rows = json.loads(self._told("list", *files))
        return [Mutation(file, operator, number, tuple(a), tuple(b)) for file, operator, number, a, b in rows]

    def source(self, mutation: Mutation) -> str:
        """The file's source with the mutation."""
        return self._told("apply", mutation.file, mutation.operator, str(mutation.occurrence))

    def _told(self, *words: str) -> str:
        command = [self.python, HERE / "positions.py", *words]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def drawn(seed: int) -> Iterator[str]:
    """The entries of drawn.toml: each area's mutations in an order of its own, without those that are struck."""
    tool, struck = CosmicRay(), {fault.key for fault in read(STRUCK)}
    twice = random.Random(seed).sample(sorted(AREAS), DRAWN_IN_ALL - len(AREAS))
    for area in AREAS:
        left = 1 + (area in twice)
        for number, mutation in enumerate(sequence(tool, area, seed)):
            fault = as_fault(tool, mutation, f"{area}-{number}", area)
            if fault is None or fault.key in struck:
                continue
            print(f"{area}: number {number}, {mutation.file}:{mutation.start[0]}, {mutation.operator}", flush=True)
            yield as_toml(fault, operator=mutation.operator)
            left -= 1
            if not left:
                break


def sequence(tool: CosmicRay, area: str, seed: int) -> Iterator[Mutation]:
    """An area's mutations, one at each place, in the order that the seed draws."""
    source = ROOT / "src" / "stretto"
    files = sorted({str(path.relative_to(ROOT)) for pattern in AREAS[area] for path in source.glob(pattern)})
    silent = {file: spans(ast.parse((ROOT / file).read_text())) for file in files}
    at: dict[tuple[str, Place, Place], list[Mutation]] = defaultdict(list)
    for each in tool.mutations(files):
        if not any(start <= each.start and each.end <= end for start, end in silent[each.file]):
            at[each.file, each.start, each.end].append(each)
    generator, places = random.Random(f"{seed} {area}"), sorted(at)
    generator.shuffle(places)
    for place in places:
        yield generator.choice(at[place])


def spans(tree: ast.Module) -> list[tuple[Place, Place]]:
    """The parts of a file that are no behaviour: types, imports, texts of errors and warnings, looks of charts."""
    parts: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            parts.append(node)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            parts.append(node.returns)
        elif isinstance(node, ast.Raise):
            parts.append(node.exc)
        elif isinstance(node, ast.Assert):
            parts.append(node.msg)
        elif isinstance(node, ast.Call) and called(node) in SPEAKERS:
            parts.append(node)
        elif isinstance(node, ast.keyword) and node.arg in LOOKS:
            parts.append(node.value)
    parts += [node.value for node in tree.body if isinstance(node, ast.Assign) and is_type(node.value)]
    return [((p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset)) for p in parts if p is not None]


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def is_type(value: ast.expr) -> bool:
    """Whether a value is the name of a type: `A | B`, `Callable[[A], B]`."""
    return isinstance(value, ast.Subscript) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr))


def as_fault(tool: CosmicRay, mutation: Mutation, name: str, area: str) -> Fault | None:
    """The fault; None for what is no Python, or cannot be imported."""
    source, mutated = (ROOT / mutation.file).read_text(), tool.source(mutation)
    before, after = excerpts(source, mutated)
    try:
        ast.parse(mutated)
    except SyntaxError:  # Cosmic Ray takes the * of keyword-only arguments for a product
        return None
    if not can_be_imported(mutation.file, mutated):
        return None
    old = source.splitlines()[mutation.start[0] - 1].strip()
    new = [line.strip() for line in after.splitlines() if line not in before.splitlines()]
    return Fault(name, area, mutation.file, f"{old} -> {' '.join(new) or 'nothing'}", before, after)


def can_be_imported(file: str, source: str) -> bool:
    """Whether Python can import a file with this source in place of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(file).relative_to("src")
        (Path(folder) / path).write_text(source)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-c", f"import {module}; import stretto; stretto.Trainer"]
        return not subprocess.run(command, env=environment, capture_output=True, check=False).returncode
