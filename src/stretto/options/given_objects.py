"""Objects that a script gives instead of names: registered under names of their own, and sent to other processes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.options.object_digest import object_digest

PLACE = "given"  # "given:build" is the name of a registered object
_objects: dict[str, Any] = {}
_versions: dict[str, int] = {}
_loaded: set[Path] = set()


class ObjectFactory:
    """A function that returns an object made before, for settings that name a function.

    `digest` is the object's, "given" for data, whose examples have a digest of their own.
    """

    def __init__(self, value: Any, digest: str, *, copied: bool) -> None:
        self._value, self.digest, self._copied = value, digest, copied

    def __call__(self) -> Any:
        """The object; a copy of it for each caller if it is one that training changes."""
        from copy import deepcopy

        return deepcopy(self._value) if self._copied else self._value


def register(name: str, value: Any) -> str:
    """Register an object in place of the former one; return the name by which settings find it, "given:model"."""
    if _objects.get(name) is not value:
        _objects[name] = value
        _versions[name] = _versions.get(name, 0) + 1
    return f"{PLACE}:{name}"


def version_of(text: str) -> str:
    """How often an object was registered under this name: what is kept of a former one is out of date."""
    return f"{_versions.get(text.rpartition(':')[2], 0)}"


def registered(text: str) -> Any:
    """The object with this name. Raises UsageError in a process in which there is none."""
    key = text.rpartition(":")[2]
    if key not in _objects:
        raise UsageError(
            f"{text!r} was given as an object to a call in Python, which is not known here: make the same call again"
        )
    return _objects[key]


def is_given(text: str) -> bool:
    """Whether a name is that of a registered object."""
    return text.partition(":")[0] == PLACE


def write_objects(file: Path, names: Collection[str]) -> None:
    """Write registered objects for `read_objects`. Raises UsageError for one that cannot be pickled."""
    import cloudpickle

    chosen = {name.rpartition(":")[2]: registered(name) for name in names if is_given(name)}
    try:
        file.write_bytes(cloudpickle.dumps(chosen))
    except Exception as error:
        raise UsageError(
            f"{', '.join(chosen)} cannot be sent to other processes ({type(error).__name__}: {error}): give functions "
            "that make these objects"
        ) from error


def read_objects(file: Path | None) -> None:
    """Register what `write_objects` has written, once a process. The file is of this process's own starter."""
    if file is not None and file not in _loaded:
        import cloudpickle

        for name, value in cloudpickle.loads(file.read_bytes()).items():
            register(name, value)
        _loaded.add(file)


def given_digest(value: Any) -> str:
    """The digest of a registered object."""
    return value.digest if isinstance(value, ObjectFactory) else object_digest(value)
