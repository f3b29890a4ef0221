"""Asks HTTP endpoints whether they are ready, without blocking the event loop."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit


async def http_ready(base_url: str) -> bool:
    """Whether ``GET <base_url>/ready`` answers 200."""
    return await _status(f"{base_url}/ready") == 200


async def _status(url: str) -> int:
    """HTTP status of a GET; 0 where nothing answers within a second."""
    parts = urlsplit(url)
    # Of an own process on this machine, whose certificate is for the name by which clients know it.
    tls = ssl._create_unverified_context() if parts.scheme == "https" else None
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
            try:
                writer.write(f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
                line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
