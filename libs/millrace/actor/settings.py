"""Values set by path, ``a.b.0.c=value``, over a table of configuration. Pure."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from typing import Any

from millrace.actor.errors import ConfigError


def with_settings(table: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """A copy with each ``a.b.0.c=value`` set in turn. Numbers index lists; a value is TOML or JSON, else a string.

    Raises:
        ConfigError: naming the setting.
    """
    result: Any = _copied(table)
    for setting in settings:
        path, value = parsed(setting)
        place = result
        for word in path[:-1]:
            if isinstance(place, dict):
                place = place.setdefault(word, {})
            else:
                place = place[_index(place, word, setting)]
        if isinstance(place, dict):
            place[path[-1]] = value
        else:
            place[_index(place, path[-1], setting)] = value
    return dict(result)


def parsed(setting: str) -> tuple[list[str], Any]:
    """Path and value of a setting.

    Raises:
        ConfigError: it is none.
    """
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting}: must be key=value")
    return key.strip().split("."), _value(text.strip())


def _index(place: Any, word: str, setting: str) -> int:
    if isinstance(place, list) and word.isdigit() and int(word) < len(place):
        return int(word)
    raise ConfigError(f"--set {setting}: there is no {word}")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if isinstance(value, list) else value
