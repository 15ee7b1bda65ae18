"""Names with options, "chunked(chunks=4)": how they are read, and how the options are checked. No torch."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeVar

from stretto.errors import UsageError, nearest
from stretto.options.checks import is_whole, shown


def parse(text: str, what: str = "method") -> tuple[str, dict[str, Any]]:
    """Split "chunked(chunks=4)" into its name and its options, ("chunked", {"chunks": 4}).

    A value is a Python literal or a bare word. A word may be hyphenated, have options of its own,
    `head=two-layer(width=64)`, or name a function of the user's, `head=path/to/file.py:function`. Raises UsageError,
    which calls the text a `what`, for anything else.
    """
    try:
        name, options = name_and_options(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(
            f"cannot read the {what} {text!r} ({error}): write it as NAME or NAME(option=value, ...)"
        ) from error
    return name, dict(options)


@lru_cache(maxsize=1024)
def name_and_options(text: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The name and its (option, value) pairs, read once a process. Raises SyntaxError or ValueError.

    Settings, every stage's head and the Trainer ask for the same few texts.
    """
    name, parenthesis, rest = text.strip().partition("(")
    if not parenthesis:
        return name, ()
    call = ast.parse(f"f({DIGITS.sub(quoted, FUNCTION.sub(quoted, PATH.sub(quoted, rest)))}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("options are written name=value")
    names = [keyword.arg or "**" for keyword in call.keywords]
    if len(names) > len(set(names)):
        raise ValueError("an option stands twice")
    return name.strip(), tuple((keyword.arg or "**", literal(keyword.value)) for keyword in call.keywords)


PATH = re.compile(r"(\bpath\s*=\s*)([^\s'\",()]+)")
FUNCTION = re.compile(r"(=\s*)([^\s'\",(){}\[\]=:]+:\w+(?:\([^()]*\))?)")

DIGITS = re.compile(  # names that begin with a digit, or have one behind a hyphen: 1f1b(microbatches=4), pipedream-2bw
    r"(=\s*)((?:[A-Za-z]\w*-)*[1-9]\d*(?![eEjJ_])[A-Za-z]\w*(?:\((?:[^()]|\([^()]*\))*\))?)"
)


def quoted(option: re.Match[str]) -> str:
    """`path=a/b.csv` as `path='a/b.csv'`, and a function's name alike."""
    return f"{option[1]}{option[2]!r}"


def literal(node: ast.expr) -> Any:
    """The value of a literal; a bare word stands for itself (`combine=mean`), but for true, false and none."""
    if isinstance(node, ast.Name):
        return WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.Call | ast.BinOp) and isinstance(leftmost(node), ast.Name) and not positional(node):
        return ast.unparse(node).replace(" - ", "-")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return ast.unparse(node).replace(" ", "")  # several stages, 1+3
    return ast.literal_eval(node)


def positional(node: ast.expr) -> bool:
    """Whether a call, as a word with options is parsed, has an option without a name."""
    return isinstance(node, ast.Call) and bool(node.args)


def leftmost(node: ast.expr) -> ast.expr:
    """The first operand of an expression, or the function that it calls: `two` in `two-layer(width=64)`."""
    while isinstance(node, ast.Call | ast.BinOp):
        node = node.func if isinstance(node, ast.Call) else node.left
    return node


WORDS = {"true": True, "false": False, "none": None}


def split_list(text: str) -> list[str]:
    """Split "greedy,chunked(chunks=4, head=linear)" at the commas that stand outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


MOST = 10**12  # larger whole numbers are mistyped


def option_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's keyword-only options."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def resolve(owner: str, function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, object]:
    """All keyword-only options of `function`, in its order: those given, and its defaults for the rest.

    Raises UsageError for a name that the function does not know, with the nearest one that it does. `owner` is the
    message's subject, "model 'mlp'".
    """
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in options:
        if name not in defaults:
            raise UsageError(f"{owner} has no option {name!r}; {nearest(name, defaults)}")
    return defaults | dict(options)


def whole(owner: str, option: str, value: object, *, least: int = 1) -> None:
    """Refuse a `value` that is no whole number from `least` to 10**12; True is none."""
    if not is_whole(value) or value < least:
        raise UsageError(f"{owner}: {option}={shown(value)} must be a whole number of at least {least}")
    if value > MOST:
        raise UsageError(f"{owner}: {option}={value} must be at most {MOST:,}")


def choose(owner: str, option: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a `value` that is none of the `choices`, or equal to one but of another type, as True and 1 are."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        among = (
            nearest(value, map(str, choices)) if isinstance(value, str) else f"choose {', '.join(map(str, choices))}"
        )
        raise UsageError(f"{owner}: {option}={shown(value)}; {among}")


C = TypeVar("C")


def find_choice(text: str, what: str, choices: Mapping[str, type[C]]) -> C:
    """The dataclass that a text names, made with its options.

    Raises UsageError for an unknown name or option. `what` is the choice's noun in messages.
    """
    bare, options = parse(text, what)
    if bare not in choices:
        raise UsageError(f"unknown {what} {bare!r}: {nearest(bare, choices)}")
    option_names = [field.name for field in fields(choices[bare])]  # type: ignore[arg-type]
    for key in options:
        if key not in option_names:
            raise UsageError(f"{what} {bare!r} has no option {key!r}: {nearest(key, option_names)}")
    return choices[bare](**options)


def choice_text(name: str, choice: Any) -> str:
    """The text from which `find_choice` makes this dataclass again; options that are None are left out."""
    values = [(field.name, getattr(choice, field.name)) for field in fields(choice)]
    options = ", ".join(f"{key}={option_text(value)}" for key, value in values if value is not None)
    return f"{name}({options})" if options else name


def option_text(value: Any) -> str:
    """An option's value as text: quoted if it is a string that would not be read as one."""
    is_word = isinstance(value, str) and value.replace("-", "_").isidentifier() and value.lower() not in WORDS
    return repr(value) if isinstance(value, str) and not is_word else str(value)
