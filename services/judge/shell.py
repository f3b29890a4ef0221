"""Carries out the judge's own effects: chat completions over HTTP, in threads, each with a deadline."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from millrace.actor.effects import Effect
from millrace.actor.errors import ConfigError
from millrace.actor.task_shell import TaskShell

from services.judge.config import JudgeConfig
from services.judge.effects import AskingFailed, AskModel, ModelAnswered

#: Requests under way at once; others wait, within their deadline.
THREADS = 32
#: Longest answer that is read, bytes: eight tokens with twenty log-probabilities each are under 20 KB.
PAYLOAD_MAX = 1 << 20
#: Bytes that are read at once, between two looks at the clock.
CHUNK = 1 << 16
#: Of a server's complaint so much is kept, characters.
DETAIL_MAX = 200


class PostFailed(Exception):
    """No usable answer came."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why = why


class JudgeShell(TaskShell):
    """The shell of one judge process.

    Raises:
        ConfigError: the key file cannot be read.
    """

    def __init__(self, config: JudgeConfig) -> None:
        super().__init__()
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._timeout_s = config.timeout_s
        self._headers = _headers(config)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="judge-http")

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {AskModel: lambda effect: self.spawn(self._ask(effect))}

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, effect: AskModel) -> None:
        deadline = time.monotonic() + self._timeout_s
        run = asyncio.get_running_loop().run_in_executor
        asked = [run(self._pool, post, self._url, body, self._headers, deadline) for body in effect.bodies]
        try:
            async with asyncio.timeout(self._timeout_s):
                payloads = await asyncio.gather(*asked)
        except TimeoutError:
            detail = f"no answer within {self._timeout_s:g} s"
            self.tell(AskingFailed(correlation=effect.correlation, why="timeout", detail=detail))
        except PostFailed as error:
            self.tell(AskingFailed(correlation=effect.correlation, why=error.why, detail=str(error)))
        else:
            self.tell(ModelAnswered(correlation=effect.correlation, payloads=payloads))
        finally:
            for future in asked:
                future.cancel()


def _headers(config: JudgeConfig) -> dict[str, str]:
    headers = {"content-type": "application/json", "user-agent": "millrace-judge"}
    if config.key_file:
        try:
            headers["authorization"] = f"Bearer {Path(config.key_file).read_text().strip()}"
        except OSError as error:
            raise ConfigError(f"key_file {config.key_file}: {error.strerror}") from None
    return headers


def post(url: str, body: bytes, headers: Mapping[str, str], deadline: float) -> bytes:
    """Posts a body; returns that of an answer with status 200. Blocks until ``deadline`` (monotonic) at the latest, but
    for the time that one read takes.

    Raises:
        PostFailed: there is no such answer.
    """
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")  # checked above
    left = deadline - time.monotonic()
    if left <= 0:
        raise PostFailed("timeout", "its turn did not come in time")
    try:
        with urllib.request.urlopen(request, timeout=left) as answer:
            return _read(answer, deadline)
    except urllib.error.HTTPError as error:
        raise PostFailed("status", f"status {error.code}: {error.reason}"[:DETAIL_MAX]) from None
    except TimeoutError:
        raise PostFailed("timeout", "no answer in time") from None
    except (OSError, HTTPException) as error:
        raise PostFailed("unreachable", str(error)[:DETAIL_MAX]) from None


def _read(answer: Any, deadline: float) -> bytes:
    payload = b""
    while chunk := answer.read1(CHUNK):
        payload += chunk
        if len(payload) > PAYLOAD_MAX:
            raise PostFailed("status", f"an answer of over {PAYLOAD_MAX} bytes")
        if time.monotonic() > deadline:
            raise PostFailed("timeout", "the answer did not end in time")
    return payload
