"""The file of API keys that ``millrace keys`` writes and ingress reads: hashes and limits, never a key.

A key is 256 random bits, so a plain SHA-256 of it cannot be searched; a slow password hash would only slow ingress.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

#: What a key looks like: ``mr-`` and 43 characters of URL-safe base64. The prefix lets secret scanners find one.
KEY_PREFIX = "mr-"
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. Limits of 0 mean none.

    Attributes:
        name: Shown in traces, metrics and outcomes.
        sha256: Hash of the key, lower-case hex.
        adapters: Whether it may load and unload LoRA adapters.
        metrics: Whether it may read /metrics, which asks for such a key where there is one.
    """

    name: str
    sha256: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    adapters: bool = False
    metrics: bool = False


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file (TOML, tables ``[[keys]]``)."""

    keys: list[KeyRecord] = []


def hash_key(key: str | bytes) -> str:
    """Return the stored form of a key: its SHA-256, lower-case hex."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def read_key_file(payload: bytes) -> KeyFile:
    """Reads and checks a file.

    Raises:
        ValueError: it is no such file; the message says why.
    """
    file = msgspec.toml.decode(payload, type=KeyFile)  # its errors are ValueErrors
    names: set[str] = set()
    for record in file.keys:
        if not NAME_PATTERN.fullmatch(record.name):
            raise ValueError(f"name {record.name!r}: letters, digits and _ . @ - only, at most 64")
        if record.name in names:
            raise ValueError(f"name {record.name!r} stands twice")
        if not re.fullmatch("[0-9a-f]{64}", record.sha256):
            raise ValueError(f"sha256 of {record.name!r} is not 64 lower-case hex digits")
        if min(record.requests_per_minute, record.tokens_per_minute, record.concurrency) < 0:
            raise ValueError(f"a limit of {record.name!r} is negative")
        names.add(record.name)
    return file


def format_key_file(file: KeyFile) -> str:
    """The file's text. Every value is a checked name, hex, an integer or true, so nothing needs escaping."""
    out = ["# API keys of Millrace's ingress: hashes only. Written by `millrace keys`; read again when it changes.\n"]
    for record in file.keys:
        lines = [f'name = "{record.name}"', f'sha256 = "{record.sha256}"']
        for field in ("requests_per_minute", "tokens_per_minute", "concurrency"):
            if value := getattr(record, field):
                lines.append(f"{field} = {value}")
        lines += [f"{right} = true" for right in ("adapters", "metrics") if getattr(record, right)]
        out.append("\n[[keys]]\n" + "\n".join(lines) + "\n")
    return "".join(out)
