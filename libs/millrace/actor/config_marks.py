"""Fields of configurations that are no keys of a person's: wiring, and constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.inspect import DictType, Field, ListType, Metadata, StructType, Type, UnionType, type_info

from millrace.actor.errors import ConfigError

#: A field that follows from a cluster's file: whoever deploys writes it into each process's own file, and a cluster's
#: ``settings`` may not set it.
WIRED = msgspec.Meta(extra={"set_by": "deployment"})

#: A field that no file sets. Simulations and tests vary it where they make the object.
CONSTANT = msgspec.Meta(extra={"set_by": "nothing"})


def is_wired(field: Field) -> bool:
    """Whether a deployment writes it."""
    return _set_by(field) == "deployment"


def is_constant(field: Field) -> bool:
    """Whether no file sets it."""
    return _set_by(field) == "nothing"


def refuse_constants(table: Any, kind: Any) -> None:
    """Refuses a file's table of this type where it sets a constant. Raises ConfigError naming the key."""
    for path, field in _given(table, type_info(kind), ""):
        if is_constant(field):
            raise ConfigError(f"{path}: it is a constant; leave it out")


def refuse_wired(table: Any, kind: Any, *, instead: Mapping[str, str], where: str) -> None:
    """Refuses settings of this type where they set what follows from the rest of a cluster's file.

    Args:
        instead: Key of the cluster's file by path, for the error.
        where: Beginning of the path in the error.

    Raises:
        ConfigError: naming the key.
    """
    for path, field in _given(table, type_info(kind), ""):
        if is_wired(field):
            keys = (key for key in instead if path == key or path.startswith(f"{key}."))
            other = next((f"set `{instead[key]}`" for key in keys), "it follows from the rest of the cluster's file")
            raise ConfigError(f"{where}.{path}: {other}")


def _given(table: Any, kind: Type | None, path: str) -> Iterator[tuple[str, Field]]:
    """Marked fields that a table has, with their paths; nothing within a marked one."""
    if isinstance(table, list):
        for index, each in enumerate(table):
            yield from _given(each, items_of(kind), f"{path}.{index}")
    if not isinstance(table, dict):
        return
    struct = struct_of(kind)
    fields = {field.encode_name: field for field in struct.fields} if struct is not None else {}
    for name, value in table.items():
        here = f"{path}.{name}".lstrip(".")
        field = fields.get(name)
        if field is not None and _set_by(field):
            yield here, field
        else:
            yield from _given(value, field.type if field is not None else items_of(kind), here)


def _set_by(field: Field) -> str:
    kind = field.type
    return str((kind.extra or {}).get("set_by", "")) if isinstance(kind, Metadata) else ""


def plain_type(kind: Type | None) -> Type | None:
    """The type without its marks."""
    return kind.type if isinstance(kind, Metadata) else kind


def struct_of(kind: Type | None) -> StructType | None:
    """The Struct that a type is, marks and an optional None aside; None for another type."""
    kind = plain_type(kind)
    if isinstance(kind, UnionType):
        return next(filter(None, map(struct_of, kind.types)), None)
    return kind if isinstance(kind, StructType) else None


def items_of(kind: Type | None) -> Type | None:
    """Type of the items of a list or the values of a dictionary; None for another type."""
    kind = plain_type(kind)
    if isinstance(kind, ListType):
        return kind.item_type
    return kind.value_type if isinstance(kind, DictType) else None
