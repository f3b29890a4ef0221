"""The exception tree of infrastructure. Raised and caught in runtimes and shells only; actors see values.

MillraceError
├── ConfigError            a configuration file or option is wrong; says which key and value
├── MalformedMessage       bytes that are no known message
├── BusError
│   ├── BusUnavailable     no server within the time given
│   └── BusRefused         the server refused: permissions, credentials
└── EngineError
    └── EngineStartFailed  with the reason the engine gave
"""

from __future__ import annotations

from millrace.contracts.codec import MalformedMessage as _MalformedMessage


class MillraceError(Exception):
    """Base of all expected infrastructure failures."""


class ConfigError(MillraceError):
    """A configuration value is wrong. The message names the key and the value."""


MalformedMessage = _MalformedMessage


class BusError(MillraceError):
    """Something about the message bus."""


class BusUnavailable(BusError):
    """No server answered within the time given."""


class BusRefused(BusError):
    """The server refused credentials or a permission."""


class EngineError(MillraceError):
    """Something about an inference engine."""


class EngineStartFailed(EngineError):
    """The engine did not start; carries its reason."""
