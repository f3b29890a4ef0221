"""The nearest field to an unknown one, for errors about configurations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from msgspec import inspect

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
    found: inspect.Type | None = inspect.type_info(kind)
    for step in _STEP.finditer(told["path"] or ""):
        found = _within(found, step["field"])
    for each in (found, *getattr(found, "types", ())):
        if isinstance(each, inspect.StructType) and (instead := RENAMED.get(f"{each.cls.__name__}.{told['name']}")):
            return f" ({instead})"
    return nearest_name(told["name"], [field.encode_name for field in _fields(found)])


def nearest_name(word: str, known: Iterable[str]) -> str:
    """`` (did you mean `x`?)`` for the nearest known name; empty where none is near."""
    near = get_close_matches(word, list(known), n=1)
    return f" (did you mean `{near[0]}`?)" if near else ""


def _fields(kind: inspect.Type | None) -> tuple[inspect.Field, ...]:
    if isinstance(kind, inspect.UnionType):
        return tuple(field for each in kind.types for field in _fields(each))
    return kind.fields if isinstance(kind, inspect.StructType) else ()


def _within(kind: inspect.Type | None, field: str | None) -> inspect.Type | None:
    """Type of a field, or of the items where none is named; None where there is no such thing."""
    if isinstance(kind, inspect.UnionType):
        return next(filter(None, (_within(each, field) for each in kind.types)), None)
    if field is not None:
        return next((each.type for each in _fields(kind) if each.encode_name == field), None)
    if isinstance(kind, inspect.ListType):
        return kind.item_type
    return kind.value_type if isinstance(kind, inspect.DictType) else None
