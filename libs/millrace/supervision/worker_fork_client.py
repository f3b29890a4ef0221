"""Client of the worker fork server, whose protocol is in services/worker/fork_server.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.actor.errors import MillraceError

#: Pause between attempts to connect while the fork server still imports, seconds.
RETRY_S = 0.05
LINE_BYTES_MAX = 65_536


class WorkerForkServerLost(MillraceError):
    """There is no fork server: it did not come up, or ended. Its workers end with it."""


class ForkFailed(MillraceError):
    """The fork server did not fork; carries its reason."""


class WorkerForkClient:
    """One connection to a fork server. Lives on one event loop.

    Args:
        path: The fork server's socket.
        on_exit: Called with (pid, code) when any of the fork server's workers ended; a signal is negative.
        on_lost: Called once when the connection ended without ``close()``.
    """

    def __init__(
        self, path: Path | str, *, on_exit: Callable[[int, int], None], on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._path = str(path)
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._open: dict[int, asyncio.Future[int]] = {}
        self._serial = 0
        self.pid = 0

    async def connect(self, timeout_s: float = 60.0) -> None:
        """Connects, waiting for a fork server that is still importing.

        Raises:
            WorkerForkServerLost: there is none within the time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                reader, self._writer = await self._dial()
                hello = msgspec.json.decode(await reader.readline())
        except (TimeoutError, OSError, msgspec.DecodeError) as error:
            raise WorkerForkServerLost(f"{self._path}: {error or 'no fork server in time'}") from None
        self.pid = int(hello["pid"])
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(RETRY_S)

    async def fork(self, config: Path | str, *, log: Path | str = "", cores: Sequence[int] | None = None) -> int:
        """Forks a worker with a configuration file; returns its pid, which leads a process group.

        Raises:
            ForkFailed: with the fork server's reason. WorkerForkServerLost: it ended.
        """
        if self._writer is None or self._reading is None or self._reading.done():
            raise WorkerForkServerLost(f"{self._path}: not connected")
        self._serial += 1
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[self._serial] = answer
        request = _request(self._serial, config=config, log=log, cores=cores)
        self._writer.write(msgspec.json.encode(request) + b"\n")
        return await answer

    def kill(self, pid: int, number: int) -> None:
        """Sends a signal to a worker that the fork server forked; unknown pids are no error."""
        if self._writer is not None:
            self._writer.write(msgspec.json.encode({"kill": pid, "signal": number}) + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._take(msgspec.json.decode(line))
        except (OSError, ValueError, msgspec.DecodeError):
            pass  # told as lost, below
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(WorkerForkServerLost(f"{self._path}: the fork server ended"))
        self._open.clear()
        self._on_lost()

    def _take(self, message: dict[str, Any]) -> None:
        if "exited" in message:
            self._on_exit(message["exited"], message["code"])
            return
        answer = self._open.pop(message.get("id", 0), None)
        if answer is None or answer.done():
            return
        if "pid" in message:
            answer.set_result(message["pid"])
        else:
            answer.set_exception(ForkFailed(str(message.get("error"))))

    async def close(self) -> None:
        """Hangs up. The workers live on. Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()


def _request(serial: int, *, config: Path | str, log: Path | str, cores: Sequence[int] | None) -> dict[str, Any]:
    """The fork server may run in another folder: paths go out absolute."""
    request: dict[str, Any] = {"id": serial, "config": os.path.abspath(config)}
    if log:
        request["log"] = os.path.abspath(log)
    if cores is not None:
        request["cores"] = list(cores)
    return request
