"""A public class name means one class in the whole repository."""

import ast
from collections import defaultdict

from tests.tidy.tree import parsed, python_files

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
