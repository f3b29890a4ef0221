"""A server's TLS certificate and key, from files that may be replaced while it serves."""

from __future__ import annotations

import ssl
from pathlib import Path


class Certificate:
    """The context of new connections; those that are open keep what they began with.

    Args:
        certfile: PEM, with its chain.
        keyfile: PEM, without a passphrase.

    Raises:
        OSError: A file cannot be read, or they do not belong together (ssl.SSLError).
    """

    def __init__(self, certfile: str, keyfile: str) -> None:
        self._files = Path(certfile), Path(keyfile)
        self._stamps = self._look()
        self.context = self._load(self._new())

    def refresh(self) -> str:
        """Takes files that changed. Returns why it did not: then the ones before stay in use."""
        try:
            stamps = self._look()
            if stamps == self._stamps:
                return ""
            self._stamps = stamps
            self._load(self._new())  # a pair that does not fit would leave half of it in the context that serves
            self._load(self.context)
        except OSError as error:
            return f"{self._files[0]}: {error.strerror or error}"
        return ""

    @staticmethod
    def _new() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        certfile, keyfile = self._files
        context.load_cert_chain(certfile, keyfile, password="")
        return context

    def _look(self) -> list[tuple[int, int]]:
        return [(status.st_mtime_ns, status.st_ino) for status in (file.stat() for file in self._files)]
