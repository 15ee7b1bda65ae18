"""Makes a release ready: python scripts/release.py 0.2.0. It uploads nothing; the commands that do are printed.

The version stands in one place, `__version__` of src/stretto/__init__.py; pyproject.toml reads it there.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
VERSION = re.compile(r'^__version__ = "(\d+)\.(\d+)\.(\d+)"$', re.MULTILINE)

Version = tuple[int, int, int]


def parse(text: str) -> Version:
    """The three numbers of a version."""
    if (found := re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)) is None:
        raise SystemExit(f"{text} is no version: write three numbers, 0.2.0")
    major, minor, patch = map(int, found.groups())
    return major, minor, patch


def current(source: str) -> Version:
    """The version that a module says it has."""
    found = VERSION.findall(source)
    if len(found) != 1:
        raise SystemExit(f"{len(found)} lines of src/stretto/__init__.py say a version, not one")
    major, minor, patch = map(int, found[0])
    return major, minor, patch


def with_version(source: str, version: str) -> str:
    """A module with another version, which may not be lower."""
    if parse(version) < current(source):
        raise SystemExit(f"{version} is lower than {'.'.join(map(str, current(source)))}, which is the version now")
    return VERSION.sub(f'__version__ = "{version}"', source)


def section(changelog: str, version: str) -> str:
    """What CHANGELOG.md says of a version."""
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md says nothing of {version}: give it a section, ## {version}")
    return found[1].strip()


def run(*command: str | Path) -> str:
    """What a command prints; its failure ends the release."""
    print("$", *command, flush=True)
    return subprocess.run(
        [str(word) for word in command], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout


def main(version: str) -> None:
    """Set the version, build everything, look at what was built."""
    parse(version)
    section((ROOT / "CHANGELOG.md").read_text(), version)
    module = ROOT / "src" / "stretto" / "__init__.py"
    changed = with_version(module.read_text(), version)
    if run("git", "status", "--porcelain").strip():
        raise SystemExit("there are changes that are not committed: commit or stash them first")
    module.write_text(changed)
    run("make", "wheel", "docs")
    wheel = ROOT / "dist" / f"stretto-{version}-py3-none-any.whl"
    unpacked = ROOT / "build" / "wheel"
    run(PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", unpacked, wheel)
    told = run(
        PYTHON, "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); import stretto; print(stretto.__version__)"
    )
    if told.strip() != version:
        raise SystemExit(f"the wheel says that it is {told.strip()}, not {version}")
    print(f"\n{wheel.relative_to(ROOT)}, its source archive and build/site are ready. To publish them:\n")
    print(f"  git commit -am 'Version {version}' && git tag v{version} && git push --follow-tags")
    print(f"  twine upload dist/stretto-{version}*")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"{__doc__}")
    main(sys.argv[1])
