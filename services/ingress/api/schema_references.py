"""Schemas within a JSON Schema, and what its references lead to. Faults of references show when a worker tries it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Keywords whose content is data, not schema.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
#: Keywords whose content maps names to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})


def subschemas(root: Any) -> Iterator[dict[str, Any]]:
    """Every schema object in a schema, itself included; not the values that it lists."""
    return (node for _, node in located(root))


def located(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same, each with its place, such as ``$.properties.name``."""
    stack: list[tuple[str, Any, bool]] = [("$", root, False)]
    while stack:
        place, node, named = stack.pop()
        if isinstance(node, list):
            stack.extend((f"{place}[{index}]", item, False) for index, item in enumerate(node))
        elif isinstance(node, dict) and named:
            stack.extend((f"{place}.{key}", item, False) for key, item in node.items())
        elif isinstance(node, dict):
            yield place, node
            stack.extend((f"{place}.{key}", item, key in _NAMED) for key, item in node.items() if key not in _DATA)


def target(root: dict[str, Any], schema: Any) -> Any:
    """The target of a schema's reference, a JSON pointer into the root; the schema itself where it has none."""
    if not isinstance(schema, dict) or "$ref" not in schema:
        return schema
    node: Any = root
    for part in str(schema["$ref"]).removeprefix("#").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if name and isinstance(node, list):
            node = node[int(name)] if name.isdigit() and int(name) < len(node) else None
        elif name:
            node = node.get(name) if isinstance(node, dict) else None
    return node
