"""Forks workers from one process that has imported vLLM: a start of two seconds instead of nine, and shared pages.

    python -m services.worker.fork_server --socket PATH

Protocol: JSON lines over a Unix stream socket; several clients may connect.

    from the fork server, first  {"ready": true, "pid": ..., "vllm": "0.32.0"}
    to the fork server           {"id": 1, "config": "worker-0.toml", "log": "worker-0.log", "cores": [1]}
    from the fork server         {"id": 1, "pid": 4711}         the worker is forked (not yet ready: it says so on the
                                                                bus with its first ServicePresence)
                                 {"id": 1, "error": "..."}      it could not be
                                 {"exited": 4711, "code": 0}    later, to every client; a signal is negative
    to the fork server           {"kill": 4711, "signal": 15}   only pids that it forked; unknown ones are no error

``log`` receives the worker's standard output and error (appended; empty leaves them as the fork server's). ``cores``
replaces the configuration's ``engine_cores`` where given. A worker leads a process group of its own.

The fork server reaps its workers. They die with it, however it ends (PR_SET_PDEATHSIG), and their engines with them; on
SIGTERM it passes the signal on and waits for them to drain, on a second one it ends at once. It has one thread and has
touched no GPU, which is what makes forking safe; it checks the first and refuses to serve otherwise.
"""

from __future__ import annotations

import argparse
import gc
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

#: How long workers may drain after SIGTERM before the fork server ends, and they with it, seconds.
DRAIN_LIMIT_S = 15.0
#: Longest line that is read: two paths and a few numbers.
LINE_BYTES_MAX = 65_536


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a worker, or with ``kill`` for a signal to one."""

    id: int = 0
    config: str = ""
    log: str = ""
    cores: list[int] | None = None
    kill: int = 0
    signal: int = signal.SIGTERM


class WorkerForkServer:
    """The listening process. One thread, one selector; nothing in it blocks but the selector."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[socket.socket, bytes] = {}
        self._workers: set[int] = set()
        self._stop_at: float | None = None
        self._wake_read, self._wake_write = socket.socketpair()

    def serve(self) -> int:
        """Listens until it is told to end; returns the exit code."""
        path = str(self._path)
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(8)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._watch_signals()
        while not self._done():
            for key, _ in self._selector.select(timeout=None if self._stop_at is None else 0.1):
                key.data(key.fileobj)
        self._path.unlink(missing_ok=True)
        return 0

    def _done(self) -> bool:
        return self._stop_at is not None and (not self._workers or time.monotonic() >= self._stop_at)

    def _watch_signals(self) -> None:
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)

    def _on_stop(self, number: int, frame: Any) -> None:
        limit = DRAIN_LIMIT_S if self._stop_at is None else 0.0
        self._stop_at = time.monotonic() + limit
        for pid in list(self._workers):
            _signal(pid, signal.SIGTERM)

    def _on_wake(self, end: socket.socket) -> None:
        """Reaps whatever ended: workers, and the engines of workers that were killed (see become_subreaper)."""
        end.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:
                self._workers.discard(pid)
                for client in list(self._buffers):
                    self._send(client, {"exited": pid, "code": os.waitstatus_to_exitcode(status)})

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        client.setblocking(False)
        self._buffers[client] = b""
        self._selector.register(client, selectors.EVENT_READ, self._read)
        self._send(client, {"ready": True, "pid": os.getpid(), "vllm": sys.modules["vllm"].__version__})

    def _read(self, client: socket.socket) -> None:
        try:
            received = client.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        buffered = self._buffers[client] + received
        if not received or len(buffered) > LINE_BYTES_MAX:
            self._drop(client)
            return
        *lines, self._buffers[client] = buffered.split(b"\n")
        for line in lines:
            self._answer(client, line)

    def _drop(self, client: socket.socket) -> None:
        """Forgets a client; the workers that it asked for live on."""
        self._selector.unregister(client)
        del self._buffers[client]
        client.close()

    def _answer(self, client: socket.socket, line: bytes) -> None:
        try:
            request = msgspec.json.decode(line, type=ForkRequest)
        except msgspec.DecodeError as error:
            self._send(client, {"id": 0, "error": str(error)})
            return
        if request.kill:
            if request.kill in self._workers:
                _signal(request.kill, request.signal)
            return
        if not Path(request.config).is_file() or self._stop_at is not None:
            reason = f"{request.config}: no such file" if self._stop_at is None else "the fork server is ending"
            self._send(client, {"id": request.id, "error": reason})
            return
        pid = os.fork()
        if pid == 0:
            self._become_worker(request)
        self._workers.add(pid)
        self._send(client, {"id": request.id, "pid": pid})

    def _send(self, client: socket.socket, message: dict[str, Any]) -> None:
        try:
            client.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            pass  # it has hung up, or reads nothing; its socket says so by itself

    def _become_worker(self, request: ForkRequest) -> None:
        """In the child: sheds what is the fork server's, then runs the worker. Never returns."""
        code = 1
        try:
            from services.worker.vllm_engine.process import die_with_parent

            die_with_parent()
            os.setsid()
            self._shed()
            if request.log:
                _redirect(request.log)
            from services.worker.__main__ import run

            code = run(request.config, engine_cores=request.cores)
        except BaseException:  # noqa: BLE001 - nothing may unwind into the fork server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _shed(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for end in (self._listener, self._wake_read, self._wake_write, *self._buffers):
            end.close()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ValueError, OSError):
        pass  # it has just ended, or there is no such signal: neither may end the fork server


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def load() -> None:
    """Imports everything a worker needs, so that its children have it.

    Raises:
        RuntimeError: an import left a thread running; a fork could then inherit a lock that nobody releases.
    """
    from services.worker.vllm_engine import environment

    environment.prepare()
    from services.worker.vllm_engine import preload

    preload.preload()
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports: forking is not safe")
    gc.collect()
    gc.freeze()


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m services.worker.fork_server")
    parser.add_argument("--socket", required=True, type=Path)
    arguments = parser.parse_args()
    load()
    from services.worker.vllm_engine.process import become_subreaper

    become_subreaper()
    return WorkerForkServer(arguments.socket).serve()


if __name__ == "__main__":
    # Without the interpreter's tear-down: some imported libraries complain in it, and nothing is left to be saved.
    os._exit(main())
