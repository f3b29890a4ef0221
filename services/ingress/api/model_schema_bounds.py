"""Bounds on values that a JSON Schema leaves open, for models that do not end such values by themselves.

A small model that is held to ``{"type": "integer"}`` writes digits up to ``max_tokens``: each digit is allowed, and the
brace never becomes the likeliest token. A model's folder may therefore have a file ``schema_bounds.json``; the schemas
of requests to that model get its bounds where they have none of their own, and ``json_object`` becomes such a schema.
Without the file they stay as they are.
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
#: Keywords that say nothing about a value.
_ANNOTATIONS = frozenset({"title", "description", "default", "example", "examples", "deprecated", "$comment"})
#: Keywords beside which ``propertyNames`` is not added: grammar backends refuse the pair, or these bound the names.
_NAMED = frozenset({"properties", "patternProperties", "propertyNames", "unevaluatedProperties"})

_encode = msgspec.json.Encoder().encode


class SchemaBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one model; 0 for none.

    Attributes:
        number_max: Largest magnitude of an integer or number.
        string_characters_max: Longest string without a pattern or format.
        array_items_max: Most items of an array.
        object_properties_max: Most properties of an object whose schema names none. Where it is set, their names are
            bounded as strings are, and a value of any type is a string, number, boolean or null, or an array or object
            of these.
    """

    number_max: int = 0
    string_characters_max: int = 0
    array_items_max: int = 0
    object_properties_max: int = 0


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
    """The constraint with these bounds in its schema; a schema in place of ``json_object``."""
    if structured is None or bounds == NO_BOUNDS:
        return structured
    if structured.json_object and bounds.object_properties_max:
        return StructuredOutput(json_schema=bounded_schema({"type": "object"}, bounds))
    if structured.json_schema is None:
        return structured
    schema = bounded_schema(msgspec.json.decode(structured.json_schema), bounds)
    return msgspec.structs.replace(structured, json_schema=schema)


def bounded_schema(schema: dict[str, Any], bounds: SchemaBounds) -> str:
    """JSON text of a schema with these bounds where it has none; the schema is changed."""
    if bounds.object_properties_max:
        for node in list(subschemas(schema)):
            _close(node, bounds)
    for node in subschemas(schema):
        _bound(node, bounds)
    return _encode(schema).decode()


def _types(node: dict[str, Any]) -> set[Any]:
    told = node.get("type")
    return set(told) if isinstance(told, list) else {told}


def _close(node: dict[str, Any], bounds: SchemaBounds) -> None:
    """Write out the values that this array or object leaves open: of any type, with any name."""
    if any(key in node for key in _CLOSED):
        return
    types = _types(node)
    if "array" in types and "prefixItems" not in node and _is_open(node.get("items", True)):
        node["items"] = _any_value(bounds, nested=True)
    if "object" not in types:
        return
    named = node.get("properties", {})
    for name, value in named.items():
        if _is_open(value):
            named[name] = _any_value(bounds, nested=True)
    if not node.keys() & _NAMED and node.get("additionalProperties", True) is not False:
        _close_object(node, bounds)


def _close_object(node: dict[str, Any], bounds: SchemaBounds) -> None:
    node.setdefault("maxProperties", max(bounds.object_properties_max, node.get("minProperties", 0)))
    if bounds.string_characters_max:
        node["propertyNames"] = {"maxLength": bounds.string_characters_max}
    if _is_open(node.get("additionalProperties", True)):
        node["additionalProperties"] = _any_value(bounds, nested=True)


def _is_open(schema: Any) -> bool:
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


def _any_value(bounds: SchemaBounds, *, nested: bool) -> dict[str, Any]:
    """Schema of a string, number, boolean or null; where nested, also of an array or object of these."""
    kinds: list[dict[str, Any]] = [{"type": kind} for kind in ("string", "number", "boolean", "null")]
    if nested:
        within: dict[str, Any] = {"type": "object", "additionalProperties": _any_value(bounds, nested=False)}
        _close_object(within, bounds)
        kinds += [{"type": "array", "items": _any_value(bounds, nested=False)}, within]
    return {"anyOf": kinds}


def _bound(node: dict[str, Any], bounds: SchemaBounds) -> None:
    """Add what is missing to one schema; bounds that it has are kept, and widen the others to meet them."""
    if any(key in node for key in _CLOSED):
        return
    types = _types(node)
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
