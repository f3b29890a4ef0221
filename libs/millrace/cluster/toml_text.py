"""A specification as the text of a TOML file. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from millrace.cluster.spec import ClusterSpec


def cluster_toml(spec: ClusterSpec) -> str:
    """The file that reads as ``spec``. Fields that have their default are left out."""
    fields: dict[str, Any] = msgspec.to_builtins(spec)
    fields["policies"] = {kind: choice for kind, choice in fields.get("policies", {}).items() if choice}
    return "\n".join(_table({key: value for key, value in fields.items() if value}, "")).strip() + "\n"


def _table(fields: Mapping[str, Any], path: str) -> Iterator[str]:
    """Plain values first: a key after a table's header would belong to that table."""
    nested = {key: value for key, value in fields.items() if _is_nested(value)}
    for key, value in fields.items():
        if key not in nested and value is not None:
            yield f"{_key(key)} = {inline(value)}"
    for key, value in nested.items():
        inside = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(value, list):
            for each in value:
                yield from ("", f"[[{inside}]]", *_table(each, inside))
        else:
            header = [] if value and all(_is_nested(each) for each in value.values()) else ["", f"[{inside}]"]
            yield from (*header, *_table(value, inside))


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
    )


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if bare else inline(key)


def inline(value: Any) -> str:
    """A value on one line. JSON's text of strings, numbers and booleans is TOML's, but for DEL, which is escaped."""
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {inline(each)}' for key, each in value.items() if each is not None)} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
