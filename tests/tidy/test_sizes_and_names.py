"""Sizes and names: what keeps every file readable in one sitting and guessable from its name."""

import ast
import re
from pathlib import Path

from tests.tidy.tree import ROOT, nodes, python_files

FILE_LINES_MAX = 400
TEST_FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70

#: A file with such a name says nothing about what is in it.
EMPTY_NAMES = re.compile(r"(^|_)(utils?|commons?|helpers?|managers?|misc)(_|$)")

#: `source` and `target` are the words here.
REFUSED_WORDS = {"src", "dst"}


def test_files_are_short_enough_to_read():
    too_long = []
    for path in python_files():
        lines = len((ROOT / path).read_text().splitlines())
        limit = TEST_FILE_LINES_MAX if path.parts[0] == "tests" else FILE_LINES_MAX
        if lines > limit:
            too_long.append(f"{path}: {lines} lines, the limit is {limit}")
    assert not too_long, "\n".join(too_long)


def test_functions_are_short_enough_to_read():
    too_long = [
        f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {FUNCTION_LINES_MAX}"
        for path in python_files()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not too_long, "\n".join(too_long)


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
