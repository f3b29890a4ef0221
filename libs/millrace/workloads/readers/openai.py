"""Access logs of OpenAI-like servers, vLLM's among them: JSON lines with a time and the reply's ``usage``.

Time is ``created``, ``timestamp`` or ``time``: unix seconds or ISO 8601. Tokens are ``prompt_tokens`` and
``completion_tokens``, in ``usage`` or beside it. ``model`` may be there. Lines without tokens are left out: a log has
others, too.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec

from millrace.workloads.shape import Arrival, AskedRequest, RequestShape, WorkloadError, tokens

_TIMES = ("created", "timestamp", "time")
_COUNTS = ("prompt_tokens", "completion_tokens")


def read(path: Path) -> list[Arrival]:
    """Lines with tokens in order of time.

    Raises:
        WorkloadError: the file cannot be read, a line is no JSON object, or a time or length is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WorkloadError(f"cannot be read: {error}", path=path) from None
    found = [_arrival(text, path, line) for line, text in enumerate(lines, 1) if text.strip()]
    return sorted(filter(None, found), key=lambda arrival: arrival.at_ns)


def _arrival(text: bytes, path: Path, line: int) -> Arrival | None:
    try:
        row = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise WorkloadError(f"is no JSON object: {error}", path=path, line=line) from None
    usage = row.get("usage")
    counts = usage if isinstance(usage, dict) else row
    if not all(counts.get(name) for name in _COUNTS):
        return None
    prompt, output = (tokens(counts[name], column=name, path=path, line=line) for name in _COUNTS)
    at = next((row[name] for name in _TIMES if name in row), None)
    asked = AskedRequest(str(row.get("model", "")), (output,))
    return Arrival(_unix_ns(at, path, line), RequestShape(prompt, output), asked)


def _unix_ns(at: object, path: Path, line: int) -> int:
    try:
        if isinstance(at, str) and not at.replace(".", "", 1).isdigit():
            at = datetime.datetime.fromisoformat(at).timestamp()
        return int(float(at) * 1e9)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WorkloadError(f"{' or '.join(_TIMES)} is {at!r}, which is no time", path=path, line=line) from None
