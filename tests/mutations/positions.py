"""Cosmic Ray's own part, in an environment of its own: what can be mutated where, and the mutated source.

python positions.py list FILE ...                     each mutation, as JSON: [file, operator, occurrence, start, end]
python positions.py apply FILE OPERATOR OCCURRENCE    the file's source with it
"""

import json
import sys
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


def found(file: str) -> list[Any]:
    """All mutations of a file, by the operators that take no arguments."""
    nodes = list(ast_nodes(get_ast(Path(file).read_text())))
    rows: list[Any] = []
    for name in operator_names():
        if get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        rows += [[file, name, occurrence, *place] for occurrence, place in enumerate(places)]
    return rows


if __name__ == "__main__":
    verb, *words = sys.argv[1:]
    if verb == "list":
        json.dump([row for file in words for row in found(file)], sys.stdout)
    else:
        file, name, occurrence = words
        sys.stdout.write(mutate_code(Path(file).read_text(), get_operator(name)(), int(occurrence)))
