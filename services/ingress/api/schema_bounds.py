"""Bounds on values that a JSON Schema leaves open, for models that do not end such values by themselves.

A small model that is held to ``{"type": "integer"}`` writes digits up to ``max_tokens``: each digit is allowed, and the
brace never becomes the likeliest token. A model's folder may therefore have a file ``schema_bounds.json``; the schemas
of requests to that model get its bounds where they have none of their own. Without the file they stay as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.errors import ConfigError
from millrace.contracts.worker import StructuredOutput

from services.ingress.api.schema_references import subschemas

BOUNDS_FILE = "schema_bounds.json"
#: Keywords that bound a value by themselves, or speak of another schema.
_CLOSED = ("enum", "const", "$ref")

_encode = msgspec.json.Encoder().encode


class SchemaBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one model; 0 for none.

    Attributes:
        number_max: Largest magnitude of an integer or number.
        string_characters_max: Longest string without a pattern or format.
        array_items_max: Most items of an array.
    """

    number_max: int = 0
    string_characters_max: int = 0
    array_items_max: int = 0


NO_BOUNDS = SchemaBounds()


def read_bounds(folder: Path) -> SchemaBounds:
    """Read the bounds of a model's folder; none where it has no such file.

    Raises:
        ConfigError: the file is malformed.
    """
    file = folder / BOUNDS_FILE
    if not file.is_file():
        return NO_BOUNDS
    try:
        return msgspec.json.decode(file.read_bytes(), type=SchemaBounds)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from None


def bounded_output(structured: StructuredOutput | None, bounds: SchemaBounds) -> StructuredOutput | None:
    """The constraint with these bounds in its schema."""
    if structured is None or structured.json_schema is None or bounds == NO_BOUNDS:
        return structured
    schema = msgspec.json.decode(structured.json_schema)
    for node in subschemas(schema):
        _bound(node, bounds)
    return msgspec.structs.replace(structured, json_schema=_encode(schema).decode())


def _bound(node: dict[str, Any], bounds: SchemaBounds) -> None:
    """Add what is missing to one schema; bounds that it has are kept, and widen the others to meet them."""
    if any(key in node for key in _CLOSED):
        return
    told = node.get("type")
    types = set(told) if isinstance(told, list) else {told}
    if types & {"integer", "number"} and bounds.number_max:
        _bound_number(node, bounds.number_max)
    if "string" in types and bounds.string_characters_max and not node.keys() & {"pattern", "format", "maxLength"}:
        node["maxLength"] = max(bounds.string_characters_max, node.get("minLength", 0))
    if "array" in types and bounds.array_items_max and "maxItems" not in node:
        first = len(node.get("prefixItems", []))
        node["maxItems"] = max(bounds.array_items_max, node.get("minItems", 0), first)


def _bound_number(node: dict[str, Any], largest: int) -> None:
    low = node.get("minimum", node.get("exclusiveMinimum"))
    high = node.get("maximum", node.get("exclusiveMaximum"))
    if low is None:
        node["minimum"] = -largest if high is None else min(-largest, int(high) - largest)
    if high is None:
        node["maximum"] = largest if low is None else max(largest, int(low) + largest)
