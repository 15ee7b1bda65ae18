"""What Stretto can do without and asks for by name: packages of the extras in pyproject.toml."""

from importlib.util import find_spec

from stretto.errors import UsageError

EXTRAS = {
    "report": ("altair", "vl_convert", "jinja2"),
    "trace": ("perfetto",),
    "transformers": ("transformers", "accelerate"),
}


def require(extra: str, what: str) -> None:
    """Raise UsageError where a package of this extra is not installed; imports nothing. `what` needs it."""
    lacking = missing(extra)
    if lacking:
        raise UsageError(
            f'{what} needs {" and ".join(lacking)}, which a plain installation lacks: pip install "stretto[{extra}]"'
        )


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed; imports nothing."""
    return [package for package in EXTRAS[extra] if find_spec(package) is None]
