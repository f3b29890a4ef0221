"""One difference between a recorded and a replayed effect, field by field. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.actor.recording import Difference

#: Characters of a value that are shown.
VALUE_MAX = 160

_MISSING = object()


def difference_lines(difference: Difference) -> list[str]:
    """A headline, then one line per field that differs."""
    recorded, replayed = difference.recorded, difference.replayed
    head = f"step {difference.frame}, {difference.message}, effect {difference.index + 1}"
    if recorded is None:
        return [f"{head}: not recorded, now {value_text(replayed)}"]
    if replayed is None:
        return [f"{head}: recorded {value_text(recorded)}, now nothing"]
    return [f"{head}: {_name(recorded)}", *changed_fields(recorded, replayed)]


def changed_fields(recorded: Any, replayed: Any, path: str = "") -> Iterator[str]:
    """Lines ``  path: was → is``, going into dictionaries and lists of equal length."""
    if isinstance(recorded, dict) and isinstance(replayed, dict):
        for key in dict.fromkeys([*recorded, *replayed]):
            yield from changed_fields(
                recorded.get(key, _MISSING), replayed.get(key, _MISSING), f"{path}.{key}" if path else str(key)
            )
    elif isinstance(recorded, list) and isinstance(replayed, list) and len(recorded) == len(replayed):
        for index, (was, now) in enumerate(zip(recorded, replayed, strict=True)):
            yield from changed_fields(was, now, f"{path}[{index}]")
    elif recorded is _MISSING or replayed is _MISSING or recorded != replayed:
        yield f"  {path or 'value'}: {value_text(recorded)} → {value_text(replayed)}"


def value_text(value: Any) -> str:
    """A value on one line, bounded."""
    text = "(absent)" if value is _MISSING else repr(value)
    return text if len(text) <= VALUE_MAX else text[: VALUE_MAX - 1] + "…"


def _name(effect: Any) -> str:
    return str(effect.get("type", "effect")) if isinstance(effect, dict) else "effect"
