"""Damage to JSON, JSON lines and TOML files, drawn from a seed."""

import json
import tomllib

import tomli_w

VALUES = [
    None, [], {}, "x", "", -1, 0, 10**30, 10**8, 1e308, -0.5, True, [None], {"a": 1}, [[]], "../x", 2**63, ["x"], [-1],
    [10**9], float("nan"), [[[[[[[[[[1]]]]]]]]]],
]  # fmt: skip
RAW = {
    "empty": lambda _: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "no UTF-8": lambda content: b"\xff\xfe" + content,
    "null": lambda _: b"null",
    "a list": lambda _: b"[]",
    "a table": lambda _: b"{}",
    "a number": lambda _: b"3",
    "a text": lambda _: b'"x"',
    "deep lists": lambda _: b"[" * 100_000,
    "deep tables": lambda _: b'{"a":' * 50_000,
    "deep TOML": lambda _: b"a = " + b"[" * 100_000,
    "twice": lambda content: content + content,
    "blank lines": lambda _: b"\n\n",
}


def damage(file, draw):
    """Damage a file; what was done, in words. `draw` is a random.Random."""
    content = file.read_bytes()
    if draw.random() < 0.15:
        name = draw.choice(list(RAW))
        file.write_bytes(RAW[name](content))
        return name
    lines = content.decode().splitlines() if file.suffix == ".jsonl" else []
    chosen = draw.randrange(len(lines)) if lines else 0
    value = (
        json.loads(lines[chosen] if lines else content) if file.suffix != ".toml" else tomllib.loads(content.decode())
    )
    done = changed(value, draw)
    if file.suffix == ".toml":
        file.write_text(tomli_w.dumps(without_null(value)))
    elif lines:
        file.write_text("".join(f"{line}\n" for line in [*lines[:chosen], json.dumps(value), *lines[chosen + 1 :]]))
    else:
        file.write_text(json.dumps(value))
    return f"line {chosen + 1}: {done}" if lines else done


def changed(value, draw):
    """Change one member, however deep it stands."""
    places = [place for place in members(value) if place]
    if not places:
        return "nothing to change"
    *way, last = draw.choice(places)
    node = value
    for key in way:
        node = node[key]
    how = draw.choice(["delete", "set", "set", "set", "wrap", "as text", "twice"])
    if how == "delete":
        del node[last]
    elif how == "set":
        node[last] = draw.choice(VALUES)
        how = f"set to {node[last]!r:.40}"
    elif how == "wrap":
        node[last] = [node[last]]
    elif how == "as text":
        node[last] = str(node[last])
    elif isinstance(node[last], list | str):
        node[last] = node[last] + node[last]
    return f"{'.'.join(map(str, [*way, last]))}: {how}"


def members(value, place=()):
    """The places of all members of nested tables and lists; of long lists the first ones."""
    yield place
    keys = value if isinstance(value, dict) else range(min(len(value), 40)) if isinstance(value, list) else ()
    for key in keys:
        yield from members(value[key], (*place, key))


def without_null(value):
    """TOML has no null: what was set to it is gone."""
    if isinstance(value, dict):
        return {key: without_null(member) for key, member in value.items() if member is not None}
    return [without_null(each) for each in value if each is not None] if isinstance(value, list) else value
