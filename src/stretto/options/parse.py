"""How a name with options is read, "chunked(chunks=4)": that of a method, a head or a sync. No torch."""

import ast
import re
from functools import lru_cache
from typing import Any

from stretto.errors import UsageError


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
    call = ast.parse(f"f({FUNCTION.sub(quoted, PATH.sub(quoted, rest))}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("options are written name=value")
    names = [keyword.arg or "**" for keyword in call.keywords]
    if len(names) > len(set(names)):
        raise ValueError("an option stands twice")
    return name.strip(), tuple((keyword.arg or "**", literal(keyword.value)) for keyword in call.keywords)


PATH = re.compile(r"(\bpath\s*=\s*)([^\s'\",()]+)")
FUNCTION = re.compile(r"(=\s*)([^\s'\",(){}\[\]=:]+:\w+(?:\([^()]*\))?)")


def quoted(option: re.Match[str]) -> str:
    """`path=a/b.csv` as `path='a/b.csv'`, and a function's name alike."""
    return f"{option[1]}{option[2]!r}"


def literal(node: ast.expr) -> Any:
    """The value of a literal; a bare word stands for itself (`combine=mean`), but for true, false and none."""
    if isinstance(node, ast.Name):
        return WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.Call | ast.BinOp) and isinstance(leftmost(node), ast.Name) and not positional(node):
        return ast.unparse(node).replace(" - ", "-")
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
