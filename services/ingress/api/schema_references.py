"""References inside a JSON Schema: only those that a grammar can be compiled from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Keywords whose subschemas apply to the same value: a cycle through them never ends.
_SAME_VALUE = ("allOf", "anyOf", "oneOf")
#: Keywords whose content is data, not schema.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
#: Keywords whose content maps names to schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})


def reference_fault(schema: dict[str, Any]) -> str:
    """Fault in a schema's references, as a sentence; empty for none.

    A reference must be a JSON pointer into the schema itself (``#`` or ``#/...``), must resolve, and must not lead back
    to itself without consuming any JSON.
    """
    ends: set[int] = set()
    for node in subschemas(schema):
        if "$ref" not in node:
            continue
        target = resolve(schema, node["$ref"])
        if isinstance(target, str):
            return target
        if _endless(schema, node, ends):
            return f"its `$ref` {_shown(node['$ref'])} refers to itself without end."
    return ""


def _shown(reference: Any) -> str:
    return repr(str(reference)[:100])


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


def resolve(root: dict[str, Any], reference: Any) -> Any:
    """The schema that a reference points to, or the fault as a sentence."""
    if not isinstance(reference, str):
        return f"its `$ref` {_shown(reference)} is no string."
    if not reference.startswith("#"):
        return f"its `$ref` {_shown(reference)} points to another document, and none is fetched."
    if reference not in ("#", "#/") and not reference.startswith("#/"):
        return f"its `$ref` {_shown(reference)} is no JSON pointer (`#/...`)."
    node: Any = root
    for part in [p.replace("~1", "/").replace("~0", "~") for p in reference[2:].split("/") if p]:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return f"its `$ref` {_shown(reference)} points to nothing."
    return node


def _endless(root: dict[str, Any], start: dict[str, Any], ends: set[int]) -> bool:
    """Whether a schema is reached from itself through references and combinations of the same value alone.

    Args:
        ends: Schemas of which that is known not to be true; filled here, or shared ones would be followed once for each
            way to them.
    """
    path = {id(start): iter(_same_value(root, start))}
    while path:
        at = next(reversed(path))
        item = next(path[at], None)
        if item is None:
            del path[at]
            ends.add(at)
        elif id(item) in path:
            return True
        elif id(item) not in ends:
            path[id(item)] = iter(_same_value(root, item))
    return False


def _same_value(root: dict[str, Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    same = [item for key in _SAME_VALUE if isinstance(node.get(key), list) for item in node[key]]
    if "$ref" in node:
        same.append(resolve(root, node["$ref"]))
    return [item for item in same if isinstance(item, dict)]
