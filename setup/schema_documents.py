"""The wire contract as documents: JSON Schema per message type, grouped by receiver, and one AsyncAPI document.

Pure: the catalog in, a mapping of file name to text out. The same catalog gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from millrace.contracts.catalog import WIRE_TYPES
from millrace.contracts.message import Body

from setup.asyncapi import asyncapi_document

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def documents() -> dict[str, str]:
    """Every file of ``schemas/`` with its text."""
    components = described_components(WIRE_TYPES)
    files = {schema_path(kind): _text(message_schema(kind, components)) for kind in WIRE_TYPES}
    files["asyncapi.json"] = _text(asyncapi_document(components))
    return dict(sorted(files.items()))


def schema_path(kind: type[Body]) -> str:
    """``<family>/<Name>.v<version>.json``; the family is the contracts file."""
    name, version = kind.type_name().split("/")
    return f"{kind.__module__.rsplit('.', 1)[1]}/{name}.v{version}.json"


def message_schema(kind: type[Body], components: dict[str, Schema]) -> Schema:
    """A schema that stands alone: the message with what it refers to under ``$defs``."""
    own = components[kind.__name__]
    needed = sorted(_reachable(kind.__name__, components) - {kind.__name__})
    schema = {"$schema": DIALECT, **own}
    return schema | ({"$defs": {name: components[name] for name in needed}} if needed else {})


def described_components(kinds: Sequence[type[Body]]) -> dict[str, Schema]:
    """The schemas msgspec makes of all types by name, with the docstrings' ``Attributes:`` moved to the fields.

    Types that travel as arrays get their fields' names as titles of the positions.
    """
    _, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    structs = {struct.__name__: struct for struct in _structs(kinds)}
    return {
        name: _describe(schema, structs[name]) if name in structs else _tidy(schema)
        for name, schema in sorted(components.items())
    }


def _structs(kinds: Sequence[type[Body]]) -> Iterator[type[msgspec.Struct]]:
    """All Struct classes that the given ones reach."""
    seen: set[type] = set()
    open_types: list[Any] = [msgspec.inspect.type_info(kind) for kind in kinds]
    while open_types:
        info = open_types.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls in seen:
                continue
            seen.add(info.cls)
            yield info.cls
            open_types += [field.type for field in info.fields]
        else:
            open_types += list(_inner_types(info))


def _inner_types(info: Any) -> Iterator[Any]:
    for attribute in ("item_type", "key_type", "value_type"):
        if hasattr(info, attribute):
            yield getattr(info, attribute)
    yield from getattr(info, "item_types", ())
    yield from getattr(info, "types", ())


def _describe(schema: Schema, kind: type[msgspec.Struct]) -> Schema:
    summary, own = split_docstring(kind.__doc__ or "")
    notes = _inherited_notes(kind) | own
    fields = msgspec.structs.fields(kind)
    described = {key: value for key, value in schema.items() if key != "description"}
    described = {"title": described.pop("title", kind.__name__), "description": summary, **described}
    if "prefixItems" in schema:
        described["prefixItems"] = [
            {"title": field.encode_name, **_noted(item, notes.get(field.name))}
            for field, item in zip(fields, schema["prefixItems"], strict=True)
        ]
    elif "properties" in schema:
        described["properties"] = {name: _noted(item, notes.get(name)) for name, item in schema["properties"].items()}
    return described


def _inherited_notes(kind: type) -> dict[str, str]:
    """Notes of the fields that a message has from the structs that it extends."""
    notes: dict[str, str] = {}
    for base in reversed(kind.__mro__[1:]):
        notes |= split_docstring(vars(base).get("__doc__") or "")[1]
    return notes


def _noted(item: Schema, note: str | None) -> Schema:
    # Beside a $ref a description is allowed in 2020-12; the AsyncAPI writer wraps it.
    return {**item, "description": note} if note else item


def _tidy(schema: Schema) -> Schema:
    return schema | ({"description": " ".join(schema["description"].split())} if "description" in schema else {})


_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*)$")


def split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """A Google docstring as (text, notes per attribute), each on one line."""
    lines = _dedent(docstring)
    if "Attributes:" not in lines:
        return " ".join(" ".join(lines).split()), {}
    at = lines.index("Attributes:")
    notes: dict[str, str] = {}
    name = ""
    for line in lines[at + 1 :]:
        if match := _ATTRIBUTE.match(line):
            name = match[1]
            notes[name] = match[2].strip()
        elif name:
            notes[name] = f"{notes[name]} {line.strip()}".strip()
    return " ".join(" ".join(lines[:at]).split()), notes


def _dedent(docstring: str) -> list[str]:
    first, *rest = docstring.splitlines() or [""]
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return [first.strip(), *(line[margin:].rstrip() for line in rest)]


def _reachable(name: str, components: dict[str, Schema]) -> set[str]:
    found: set[str] = set()
    names = [name]
    while names:
        current = names.pop()
        if current in found:
            continue
        found.add(current)
        names += re.findall(r'"#/\$defs/([^"]+)"', json.dumps(components[current]))
    return found


def _text(document: Schema) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
