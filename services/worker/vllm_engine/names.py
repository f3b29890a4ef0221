"""Request ids inside vLLM: the sequence's id and a serial number.

The serial makes each submission distinct: when a sequence comes back in a newer epoch while the engine still works
off the older one's abort, the abort must not hit the newcomer.
"""

from __future__ import annotations

_SEPARATOR = "~"


def request_id(sequence: str, serial: int) -> str:
    """Id under which vLLM knows this submission."""
    return f"{sequence}{_SEPARATOR}{serial}"


def sequence_of(identity: str) -> str:
    """The sequence of a request id."""
    return identity.rpartition(_SEPARATOR)[0] or identity
