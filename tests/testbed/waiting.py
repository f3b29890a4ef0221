"""Waits for what signals nobody: conditions over what messages, processes and files change."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any], limit_s: float = 60.0, look_s: float = 0.005) -> Any:
    """Asks until it holds, every ``look_s``; returns what was answered. Raises TimeoutError after the limit.

    ``holds`` may return a coroutine, and shall be cheap where no ``look_s`` is given.
    """
    async with asyncio.timeout(limit_s):
        while True:
            answer = holds()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(look_s)
