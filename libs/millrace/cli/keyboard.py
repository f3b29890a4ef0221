"""One key as an event on the running loop, without Return; the terminal is given back as it was."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def key_pressed(key: str) -> Iterator[asyncio.Event]:
    """An event that is set when ``key`` is pressed. Where standard input is no terminal it never is."""
    event = asyncio.Event()
    if not sys.stdin.isatty():
        yield event
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def on_readable() -> None:
        if key.encode() in os.read(descriptor, 64):
            event.set()

    loop = asyncio.get_running_loop()
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, on_readable)
    try:
        yield event
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
