"""Names of files, classes and identifiers, in the words of the glossary, and first lines of docstrings."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.tidy.tree import nodes, parsed, python_files

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


FOLDERS = ("libs", "services", "simulator", "deployment", "setup", "compose")

#: Every policy module names its own so: the slot demands it (millrace/policies).
OF_THE_SLOT = frozenset({"Parameters", "State"})


def test_a_class_name_is_unique():
    places: dict[str, list[str]] = defaultdict(list)
    for path in python_files(*FOLDERS):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1 and name not in OF_THE_SLOT}
    assert not twice, "\n".join(f"{name}: {', '.join(where)}" for name, where in sorted(twice.items()))


#: First lines are noun phrases or imperatives, as in the documentation of the field's libraries.
QUESTION = re.compile(r"^(What|How|Whom?|Whose|Which|Where|When|Why)\b")


def test_no_docstring_opens_with_a_question_word():
    opening = [
        f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path in python_files()
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node) or "")
        and QUESTION.match(text)
    ]
    assert not opening, "\n".join(opening)
