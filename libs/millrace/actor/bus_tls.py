"""TLS of the bus, both ways: files of the folder that `millrace certs` makes, and the context of every client."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from millrace.actor.errors import ConfigError

#: The authority's certificate and key, and one file with certificate and key of servers and clients: renewing it
#: replaces both as one step.
AUTHORITY, AUTHORITY_KEY, IDENTITY = "ca.pem", "ca.key", "bus.pem"


class _Renewing(ssl.SSLContext):
    """Shows the certificate that the file has when a connection begins: it may have been renewed since the last."""

    identity = Path()

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        self.load_cert_chain(self.identity, password="")
        return super().wrap_bio(*args, **options)


def bus_context(folder: str) -> ssl.SSLContext | None:
    """The context of a client of the bus, which accepts what the folder's authority signed; None for no folder.

    Raises:
        ConfigError: a file cannot be read, or is no certificate.
    """
    if not folder:
        return None
    context = _Renewing(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    authority, context.identity = Path(folder) / AUTHORITY, Path(folder) / IDENTITY
    file = authority
    try:
        context.load_verify_locations(authority)
        file = context.identity
        context.load_cert_chain(context.identity, password="")
    except OSError as error:  # ssl's errors are some; they do not name the file
        raise ConfigError(f"{file}: {error.strerror or error}; `millrace certs {folder}` makes it") from None
    return context
