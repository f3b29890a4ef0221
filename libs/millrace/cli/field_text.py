"""Fields of messages as short text: what is empty is left out, what is long is bounded. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

#: Items of a list that are shown before the count of the rest.
ITEMS_MAX = 4

#: Characters of a text that are shown.
TEXT_MAX = 60


#: Fields that hold an id of many digits; the first tell apart those of one screen.
_IDS = ("migration", "replica", "ask", "award")
ID_DIGITS = 6

_UNIT = re.compile("_(ns|ms)$")


def shown_fields(fields: Mapping[str, Any], *, text_max: int = TEXT_MAX) -> str:
    """``key=value`` pairs; what is None, empty or False is left out, texts are cut at ``text_max`` characters."""
    shown = [(key, value) for key, value in fields.items() if value not in (None, "", [], {}) and value is not False]
    return " ".join(f"{_UNIT.sub('', key)}={_shown(key, value, text_max)}" for key, value in shown)


def _shown(key: str, value: Any, text_max: int = TEXT_MAX) -> str:
    if key in _IDS and isinstance(value, str):
        return value[:ID_DIGITS]
    if key.endswith("_ms") and isinstance(value, int):
        return f"{value}ms"
    if key.endswith("bytes") and isinstance(value, int) and value >= 2**20:
        return f"{value / 2**20:.2f}MiB"
    if key.endswith("_ns") and isinstance(value, int):
        return duration(value) if value < _YEAR_NS else f"…{value % 10**12 / 1e9:.3f}s"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        text = cut(value, text_max)
        return repr(text) if " " in text else text
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, list | tuple):
        return bounded_list([_shown("", item) for item in value])
    if isinstance(value, dict):
        return "{" + shown_fields({str(name): item for name, item in list(value.items())[:ITEMS_MAX]}) + "}"
    if isinstance(value, msgspec.Struct):
        return "{" + shown_fields(msgspec.structs.asdict(value)) + "}"
    return str(value)


_YEAR_NS = 365 * 86_400 * 10**9


def duration(ns: int) -> str:
    """A time span with three significant digits and its unit."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if abs(ns) >= size:
            return f"{ns / size:.4g}{unit}" if ns / size >= 100 else f"{ns / size:.3g}{unit}"
    return f"{ns}ns" if ns else "0"


def bounded_list(items: list[str]) -> str:
    """``[a b c d +12]``."""
    rest = f" +{len(items) - ITEMS_MAX}" if len(items) > ITEMS_MAX else ""
    return f"[{' '.join(items[:ITEMS_MAX])}{rest}]"


def cut(text: str, cells: int) -> str:
    """The text, or its beginning with an ellipsis."""
    return text if len(text) <= cells else text[: cells - 1] + "…"
