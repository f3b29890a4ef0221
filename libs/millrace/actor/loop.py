"""The event loop of a service process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Runs a service's main coroutine on uvloop where it is installed, else on asyncio's own loop."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # no wheel for this platform: slower, nothing else changes
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
