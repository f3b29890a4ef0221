"""The nearest field to an unknown one, for errors about configurations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from msgspec.inspect import Type, type_info

from millrace.actor.config_marks import items_of, struct_of
from millrace.actor.renamed_keys import RENAMED

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?$")
_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")


def nearest_field(error: str, kind: Any) -> str:
    """`` (did you mean `x`?)`` where the error is about an unknown field and a known one is near it, or what took the
    place of a field of an earlier version; else empty.

    Args:
        error: Text of a ``msgspec.ValidationError``.
        kind: Type that was decoded.
    """
    told = _UNKNOWN.search(error)
    if told is None:
        return ""
    found: Type | None = type_info(kind)
    for step in _STEP.finditer(told["path"] or ""):
        found = _within(found, step["field"])
    struct = struct_of(found)
    if struct is None:
        return ""
    if instead := RENAMED.get(f"{struct.cls.__name__}.{told['name']}"):
        return f" ({instead})"
    return nearest_name(told["name"], [field.encode_name for field in struct.fields])


def _within(kind: Type | None, field: str | None) -> Type | None:
    """Type of a field, or of the items where none is named; None where there is no such thing."""
    if field is None:
        return items_of(kind)
    struct = struct_of(kind)
    return next((each.type for each in struct.fields if each.encode_name == field), None) if struct else None


def nearest_name(word: str, known: Iterable[str]) -> str:
    """`` (did you mean `x`?)`` for the nearest known name; empty where none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""
