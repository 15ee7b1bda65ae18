"""What a configuration, study or plan file may say of each option: files come from others, and are data.

A file may name a place to write to, if that lies below the working folder and nothing is there yet. What else it names
to be written, called, or talked to is refused: the command itself has to name that. What is only read may lie anywhere.
An option that takes text or paths is in ROLES (a test goes over all commands); numbers and true and false do nothing.
"""

from enum import Enum
from pathlib import Path
from typing import Any

from stretto.errors import UsageError
from stretto.files.destinations import is_below
from stretto.options.import_object import is_function, refuse_functions
from stretto.options.named import parse, split_list
from stretto.settings.planning import EXPORTED, PAGE
from stretto.settings.runs import refuse_named


class Role(Enum):
    """What a command does with the text of an option."""

    WORD = "a choice among words, or settings of one"
    READ = "a file or a folder that is read"
    WRITTEN = "a file or a folder that is written"
    BESIDE = "a file that is read, and beside which measurements are kept"
    FUNCTION = "a network, data, a loss, ...: a function is called"
    METHOD = "methods: functions of the user's are called"
    TRACKERS = "trackers, which write files, or send to a server"
    SERVER = "what is connected to, or the secret for that"


ROLES: dict[str, Role] = {
    name: role
    for role, names in {
        Role.WRITTEN: "out trace",
        Role.BESIDE: "cluster",
        Role.READ: "plan measured diff model_options data_options",
        Role.FUNCTION: "model data loss metric optimizer",
        Role.METHOD: "method methods",
        Role.TRACKERS: "log",
        Role.SERVER: "storage rendezvous secret_file",
        Role.WORD: (
            "lr_scaling schedule precision accounting measure sync recompute device size part dtype memory_format "
            "sharding sequence_parallel layers objective penalties checkpoint_interval export"
        ),
    }.items()
    for name in names.split()
}


def refuse_untrusted(place: str, key: str, value: Any, *, takes_text: bool) -> None:
    """Raise UsageError for a value of an option that only the command itself may give; `place` is the file's."""
    name = key.replace("-", "_")
    role = ROLES[name] if takes_text else Role.WORD
    texts = [str(text) for text in (value if isinstance(value, list) else [value])]
    if role is Role.METHOD:
        refuse_functions(place, *(text for written in texts for text in split_list(written)))
    elif role is Role.FUNCTION:
        for text in texts:
            if is_function(text.partition("=")[2] or text):
                refuse_named(place, {name: text})
    elif role is Role.SERVER:
        refuse(place, key, texts[0], "connects to nobody that a file names")
    elif role is Role.TRACKERS:
        for text in (text for written in texts for text in split_list(written)):
            refuse_tracker(place, key, text)
    elif role in (Role.WRITTEN, Role.BESIDE):
        refuse_elsewhere(place, key, texts[0], may_exist=role is Role.BESIDE)


def refuse_elsewhere(place: str, key: str, text: str, *, may_exist: bool = False) -> None:
    """Refuse a path that does not lie below the working folder, is hidden there, or is something that is there."""
    path = Path(text)
    hidden = any(part.startswith(".") for part in path.parts)
    if path.is_absolute() or hidden or ".." in path.parts or not is_below(path, Path.cwd()):
        kept = " (measurements are kept beside a cluster's file)" if may_exist and key == "cluster" else ""
        refuse(place, key, text, f"writes nowhere but below the working folder, and into nothing hidden{kept}")
    if may_exist:
        return
    for each in (path, *map(path.with_suffix, (*EXPORTED, PAGE) if path.suffix else ())):
        if each.exists() and not each.is_dir():
            refuse(place, key, text, f"replaces nothing, and {each} is there already")


def refuse_tracker(place: str, key: str, text: str) -> None:
    """Refuse a tracker that sends to a server, or writes elsewhere."""
    from stretto.trackers.table import TRACKERS
    from stretto.trackers.tracker import LocalTracker

    name, options = parse(text, "tracker")
    if name in TRACKERS and not issubclass(TRACKERS[name], LocalTracker):
        refuse(place, key, text, "sends nothing to where a file says")
    if "folder" in options:
        refuse_elsewhere(place, key, str(options["folder"]), may_exist=True)


def refuse(place: str, key: str, text: str, law: str) -> None:
    """Refuse a value of a file; `law` is what a command does not do for a file."""
    raise UsageError(
        f"{place} has {key} = {text!r}: a command {law}. If you trust it, say so in the command itself: "
        f"--{key.replace('_', '-')} {text}"
    )
