"""Names: every file is guessable from its name, and identifiers use the words of the glossary."""

import ast
import re
from pathlib import Path

from tests.tidy.tree import nodes, python_files

#: A file with such a name says nothing about what is in it.
EMPTY_NAMES = re.compile(r"(^|_)(utils?|commons?|helpers?|managers?|misc)(_|$)")

#: `source` and `target` are the words here.
REFUSED_WORDS = {"src", "dst"}


def test_files_and_folders_are_named_after_what_is_in_them():
    empty = [str(path) for path in python_files() if any(EMPTY_NAMES.search(name) for name in _names_in(path))]
    assert not empty, "\n".join(empty)


def _names_in(path: Path) -> list[str]:
    return [*path.parts[:-1], path.stem]


def test_identifiers_say_source_and_target():
    refused = [
        f"{path}:{line}: {name}"
        for path in python_files()
        for name, line in _identifiers(path)
        if REFUSED_WORDS & set(name.lower().split("_"))
    ]
    assert not refused, "\n".join(refused)


def _identifiers(path: Path) -> list[tuple[str, int]]:
    """Names that this repository chose: bound names, parameters, attributes set, definitions."""
    found = []
    for node in nodes(path):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.append((name, node.lineno))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.append((name, node.lineno))
    return found
