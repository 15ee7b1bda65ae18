"""A TOML file of settings: weaker than the command line, stronger than the defaults.

Files come from others, and are data. A file may name a place to write to, if that lies below the working folder and
nothing is there yet. What else it names to be written, called, or talked to is refused: the command itself has to name
that. What is only read may lie anywhere. An option that takes text or paths is in ROLES (a test goes over all
commands); numbers and true and false do nothing.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin

from cyclopts import Token

from stretto.cli.study_file import read, study_file
from stretto.errors import UsageError, nearest
from stretto.options.import_object import is_function, refuse_functions
from stretto.options.named import parse, split_list
from stretto.settings.planning import EXPORTED, PAGE
from stretto.settings.runs import refuse_named
from stretto.system.destinations import is_below


class OptionRole(Enum):
    """What a command does with the text of an option."""

    WORD = "a choice among words, or settings of one"
    READ = "a file or a folder that is read"
    WRITTEN = "a file or a folder that is written"
    BESIDE = "a file that is read, and beside which measurements are kept"
    FUNCTION = "a network, data, a loss, ...: a function is called"
    METHOD = "methods: functions of the user's are called"
    TRACKERS = "trackers, which write files, or send to a server"
    SERVER = "what is connected to, or the secret for that"


ROLES: dict[str, OptionRole] = {
    name: role
    for role, names in {
        OptionRole.WRITTEN: "out trace roofline",
        OptionRole.BESIDE: "cluster",
        OptionRole.READ: "plan measured diff model_options data_options",
        OptionRole.FUNCTION: "model data loss metric optimizer",
        OptionRole.METHOD: "method methods",
        OptionRole.TRACKERS: "log",
        OptionRole.SERVER: "storage rendezvous secret_file",
        OptionRole.WORD: (
            "lr_scaling schedule precision accounting measure sync recompute device size part dtype memory_format "
            "sharding sequence_parallel layers objective penalties checkpoint_interval export link"
        ),
    }.items()
    for name in names.split()
}


def refuse_untrusted(place: str, key: str, value: Any, *, takes_text: bool) -> None:
    """Raise UsageError for a value of an option that only the command itself may give; `place` is the file's.

    Functions are refused before, all at once.
    """
    name = key.replace("-", "_")
    role = ROLES[name] if takes_text else OptionRole.WORD
    texts = [str(text) for text in (value if isinstance(value, list) else [value])]
    if role is OptionRole.METHOD:
        refuse_functions(place, *(text for written in texts for text in split_list(written)))
    elif role is OptionRole.SERVER:
        refuse(place, key, texts[0], "connects to nobody that a file names")
    elif role is OptionRole.TRACKERS:
        for text in (text for written in texts for text in split_list(written)):
            refuse_tracker(place, key, text)
    elif role in (OptionRole.WRITTEN, OptionRole.BESIDE):
        refuse_elsewhere(place, key, texts[0], may_exist=role is OptionRole.BESIDE)


def functions_in(key: str, value: Any) -> dict[str, str]:
    """The user's functions that a value of a file names, as messages name their settings: "loss", "metric mae"."""
    name, found = spelled(key), dict[str, str]()
    if ROLES.get(name) is not OptionRole.FUNCTION:
        return found
    for text in map(str, value if isinstance(value, list) else [value]):
        label, _, function = text.partition("=") if name == "metric" else ("", "", text)
        if is_function(function):
            found[f"metric {label}" if label else name] = function
    return found


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


# options whose value may end in .toml and is no configuration
TAKES_PATH = ("--out", "--svg", "--trace", "--plan", "--cluster", "--diff", "--measured")


def file_first(words: list[str], options: Callable[[], Sequence[str]]) -> list[str]:
    """Move a configuration file to right behind the verb: after a list of values it would be taken for one of them.

    Raises UsageError where a file stands behind a word that looks like an option and is none of `options()`.
    """
    files = [
        i
        for i, (before, word) in enumerate(itertools.pairwise(words), start=1)
        if word.endswith(".toml")
        and not word.startswith("-")
        and before not in TAKES_PATH
        and words[i - 2 : i - 1] != ["--diff"]  # the second of two
    ]
    if len(files) > 1:
        raise UsageError(f"{len(files)} configuration files ({', '.join(words[i] for i in files)}): give one")
    for before in (words[i - 1] for i in files):
        if before.startswith("--") and not before.startswith("--no-") and before.partition(".")[0] not in options():
            raise UsageError(f"unknown option {before}: {nearest(before, options())}")
    return words if not files else [words[0], words[files[0]], *words[1 : files[0]], *words[files[0] + 1 :]]


def settings_from_file(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
    """Give options that are not on the command line the file's values.

    Cyclopts calls this between reading the words and converting them.
    """
    options = {
        spelled(argument.name[2:]): argument
        for argument in arguments
        if argument.name.startswith("--") and argument.parse  # others are no options
    }
    config = next((argument for argument in arguments if argument.name == "CONFIG" and argument.tokens), None)
    if config is not None:
        for place, table in tables_of(Path(config.tokens[0].value), commands, options):
            fill(options, place, table)
    if commands == ("train",) and options["plan"].tokens:
        from stretto.plan.plan_file import training_of

        planned = Path(options["plan"].tokens[0].value)
        fill(options, f"{planned}", training_of(planned))


def tables_of(
    file: Path, commands: tuple[str, ...], options: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, settings) of each table of a file, the strongest first: one, or several of a study file for compare."""
    study = study_file(file) if commands == ("compare",) else None
    if study is None:
        content = read(file)
        refuse_plan(file, content, commands)
        yield f"{file}", content
        return
    for place, table in study.tables():  # also those that are not asked for now
        refuse_unknown(options, place, table)
    size, part = (options[name].tokens[0].value if options[name].tokens else None for name in ("size", "part"))
    yield from study.layers(size, part)


def refuse_plan(file: Path, content: Mapping[str, Any], commands: tuple[str, ...]) -> None:
    """Raise UsageError for the file of a plan or of a cluster, where a verb's own settings belong."""
    if isinstance(content.get("predicted"), dict):
        raise UsageError(
            f"{file} is a plan, and stretto {' '.join(commands)} takes a file of its own options there: stretto train "
            f"--plan {file} trains the plan, stretto show --plan {file} draws it"
        )
    if isinstance(content.get("links"), dict):
        raise UsageError(f"{file} is a cluster: stretto plan --cluster {file} plans for it")


def fill(options: Mapping[str, Any], place: str, content: Mapping[str, Any]) -> None:
    """Give options that nothing stronger has set the values of a file."""
    refuse_unknown(options, place, content)
    functions: dict[str, str] = {}
    for key, value in content.items():
        argument = options[spelled(key)]
        check_shape(f"{place}: {key} = {value!r}", key, value, argument.hint)
        if not argument.tokens:
            functions |= functions_in(key, value)
    if functions:
        refuse_named(place, functions)
    for key, value in content.items():
        argument = options[spelled(key)]
        if not argument.tokens:
            refuse_untrusted(place, key, value, takes_text=takes_text(argument.hint))
        for token in as_words(f"{key} in {place}", value, argument.tokens):
            argument.append(token)


def refuse_unknown(options: Mapping[str, Any], place: str, content: Mapping[str, Any]) -> None:
    """Raise UsageError for a key that is no option."""
    for key in content:
        if spelled(key) not in options:
            raise UsageError(f"{place}: unknown key {key!r}: {nearest(key, options)}")


def spelled(key: str) -> str:
    """A key as options are compared: batch-size and batch_size are the same."""
    return key.replace("-", "_")


def parts_of(file: Path | None, size: str | None, part: str | None) -> tuple[str, ...]:
    """The parts of a study file at a size; none for any other file, or if one `part` was asked for."""
    study = None if file is None else study_file(file)
    return () if study is None or part else study.parts(study.size(size))


def check_shape(where: str, key: str, value: Any, hint: Any) -> None:
    """Refuse a table, a list or a single value where another of the three belongs."""
    wanted = {get_origin(hint), *(get_origin(member) for member in get_args(hint))}
    if (dict in wanted) != isinstance(value, dict):
        raise UsageError(f"{where}: write {f'[{key}] and its options below' if dict in wanted else f'{key} = value'}")
    if isinstance(value, list) and tuple not in wanted:
        raise UsageError(f"{where}: one value, no list, belongs here")
    if value == []:
        raise UsageError(f"{where}: give at least one value, or leave {key} out")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if any(isinstance(member, dict | list) for member in inner):
        raise UsageError(f"{where}: only numbers, texts, true and false belong here")


def takes_text(hint: Any) -> bool:
    """Whether an option's type has texts or paths in it: others are numbers, or true and false."""
    return hint in (str, Path, Any) or any(takes_text(member) for member in get_args(hint))


def as_words(where: str, value: Any, typed: Sequence[Token]) -> Iterator[Token]:
    """A value as the words it would have been on the command line, but for options `typed` there, which win."""
    if isinstance(value, dict):
        taken = [spelled(token.keys[-1]) for token in typed if token.keys]
        for name, member in value.items():
            if spelled(name) not in taken:
                yield Token(keyword=where, value=str(member), keys=(name,), source="file")
    elif not typed:
        for index, member in enumerate(value if isinstance(value, list) else [value]):
            yield Token(keyword=where, value=str(member), index=index, source="file")
