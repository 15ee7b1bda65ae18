"""A TOML file of settings: weaker than the command line, stronger than the defaults."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from cyclopts import Token

from stretto.cli.study_file import read, study_file
from stretto.errors import UsageError, nearest

# options whose value may end in .toml and is no configuration
TAKES_PATH = ("--out", "--svg", "--trace", "--plan", "--cluster", "--diff", "--measured")


def file_first(words: list[str], options: Callable[[], Sequence[str]]) -> list[str]:
    """Move a configuration file to right behind the verb: after a list of values it would be taken for one of them.

    Raises UsageError where a file stands behind a word that looks like an option and is none of `options()`.
    """
    found = [
        i
        for i, (before, word) in enumerate(itertools.pairwise(words), start=1)
        if word.endswith(".toml")
        and not word.startswith("-")
        and before not in TAKES_PATH
        and words[i - 2 : i - 1] != ["--diff"]  # the second of two
    ]
    if len(found) > 1:
        raise UsageError(f"{len(found)} configuration files ({', '.join(words[i] for i in found)}): give one")
    for before in (words[i - 1] for i in found):
        if before.startswith("--") and not before.startswith("--no-") and before.partition(".")[0] not in options():
            raise UsageError(f"unknown option {before}: {nearest(before, options())}")
    return words if not found else [words[0], words[found[0]], *words[1 : found[0]], *words[found[0] + 1 :]]


def settings_from_file(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
    """Cyclopts calls this between reading the words and converting them: give open options the file's values."""
    options = {spelled(argument.name[2:]): argument for argument in arguments if argument.name.startswith("--")}
    given = next((argument for argument in arguments if argument.name == "CONFIG" and argument.tokens), None)
    if given is not None:
        for place, table in tables_of(Path(given.tokens[0].value), commands, options):
            fill(options, place, table)
    if commands == ("train",) and options["plan"].tokens:
        from stretto.plan.plan_file import training_of

        planned = Path(options["plan"].tokens[0].value)
        fill(options, f"{planned}", training_of(planned))


def tables_of(
    file: Path, commands: tuple[str, ...], options: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What a file says, the strongest first, each with its place: one table, or those of a study file for compare."""
    study = study_file(file) if commands == ("compare",) else None
    if study is None:
        yield f"{file}", read(file)
        return
    for place, table in study.tables():  # also those that are not asked for now
        refuse_unknown(options, place, table)
    size, part = (options[name].tokens[0].value if options[name].tokens else None for name in ("size", "part"))
    yield from study.layers(size, part)


def fill(options: Mapping[str, Any], place: str, content: Mapping[str, Any]) -> None:
    """Give options that are still open the values of a file."""
    refuse_unknown(options, place, content)
    for key, value in content.items():
        argument = options[spelled(key)]
        check_shape(f"{place}: {key} = {value!r}", key, value, argument.hint)
        for token in as_words(f"{key} in {place}", value, argument.tokens):
            argument.append(token)


def refuse_unknown(options: Mapping[str, Any], place: str, content: Mapping[str, Any]) -> None:
    """Raise UsageError for a key that is no option."""
    for key in content:
        if spelled(key) not in options:
            raise UsageError(f"{place}: unknown key {key!r}: {nearest(key, options)}")


def spelled(key: str) -> str:
    """Write batch-size and batch_size alike."""
    return key.replace("-", "_")


def parts_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of the study file that was named, unless one of them was asked for."""
    study = None if arguments.get("config") is None else study_file(arguments["config"])
    return () if study is None or arguments.get("part") else study.parts(study.size(arguments.get("size")))


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
    if any(isinstance(each, dict | list) for each in inner):
        raise UsageError(f"{where}: only numbers, texts, true and false belong here")


def as_words(where: str, value: Any, given: Sequence[Token]) -> Iterator[Token]:
    """A value as the words it would have been on the command line, without what was `given` there."""
    if isinstance(value, dict):
        taken = [spelled(token.keys[-1]) for token in given if token.keys]
        for name, each in value.items():
            if spelled(name) not in taken:
                yield Token(keyword=where, value=str(each), keys=(name,), source="file")
    elif not given:
        for index, each in enumerate(value if isinstance(value, list) else [value]):
            yield Token(keyword=where, value=str(each), index=index, source="file")
