"""API keys: who a bearer token is. The file holds hashes; it is read again when it changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
from millrace.actor.errors import ConfigError
from millrace.contracts.keyfile import KeyRecord, hash_key, read_key_file

from services.ingress.calls.messages import KeyLimits


class KeyHolder(msgspec.Struct, frozen=True):
    """Holder of a key. ``adapters``: may load and unload them. ``metrics``: may read them."""

    name: str
    limits: KeyLimits
    adapters: bool = False
    metrics: bool = False


#: Everybody, where no keys are asked for.
ANYBODY = KeyHolder("", KeyLimits(), adapters=True, metrics=True)


class ApiKeyStore:
    """Keys of one file. ``refresh`` is called about once a second by the shell; a lookup does no I/O."""

    def __init__(self, path: str | Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it is missing or wrong.
        """
        self._path = Path(path)
        self._content: bytes | None = None
        self._holders: dict[str, KeyHolder] = {}
        if fault := self.refresh():
            raise ConfigError(fault)

    def lookup(self, key: bytes) -> KeyHolder | None:
        """The holder of a key, None for nobody. The time taken tells nothing: what is looked up is a hash, which a
        caller cannot steer towards a stored one.
        """
        return self._holders.get(hash_key(key))

    @property
    def guards_metrics(self) -> bool:
        """Whether /metrics asks for a key: one has that right."""
        return any(holder.metrics for holder in self._holders.values())

    def refresh(self) -> str:
        """Read the file again if it changed; returns what went wrong, or nothing. After an error the keys stay as
        they were: a half-written or removed file must not lock everybody out.
        """
        try:
            content = self._path.read_bytes()
            if content != self._content:
                self._content = content
                self._holders = {record.sha256: _holder(record) for record in read_key_file(content).keys}
        except (OSError, ValueError) as error:
            return f"{self._path}: {error.strerror if isinstance(error, OSError) else error}"
        return ""


def _holder(record: KeyRecord) -> KeyHolder:
    limits = msgspec.convert(record, KeyLimits, from_attributes=True)
    return KeyHolder(record.name, limits, record.adapters, record.metrics)
