"""Starts Python programs by fork from a process that has imported their modules: a start without a second of imports.

One fork server belongs to one process, its owner, and listens to nobody else. A program that it starts becomes the
owner's own child, as if the owner had started ``python -m MODULE``: the owner reads its exit status with ``waitpid``,
it gets SIGTERM when the owner ends, unless it shall outlive it, and it runs on when the fork server ends.

For that the fork server forks twice, and the process between ends at once. The kernel gives its orphan to the nearest
ancestor that is a subreaper, which the owner is while it asks. An owner may have several, each with other imports.

Protocol: one JSON message each way on a SOCK_SEQPACKET pair; the request carries the descriptor for standard output
and error. Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from millrace.actor.errors import MillraceError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: Longest request: arguments and environment. Linux takes 200 KiB in one packet by default.
REQUEST_BYTES_MAX = 192 * 1024
ANSWER_BYTES_MAX = 4096

#: How long an orphan waits until it has its new parent, seconds. It takes less than a millisecond.
ADOPTION_LIMIT_S = 5.0

#: How long an owner waits for an answer, seconds: the first one comes after the imports, 5 to 15 s of vLLM; from
#: a cold disk a minute.
ANSWER_LIMIT_S = 120.0

#: Held where the next line changes.
_asking_lock = threading.Lock()
#: How many fork servers this process asks at the moment; while it is any, it takes in orphans.
_asking = 0


class ForkServerLost(MillraceError):
    """The fork server ended, does not answer, or could not fork. Programs that it started run on."""


class ProgramRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One program to start.

    Attributes:
        module: Run as ``python -m`` would run it.
        arguments: What follows the module's name on the command line.
        owner: Pid of the process that becomes its parent.
        environment: Replaces the whole environment.
        cores: Cores that it may use; empty for those of the fork server.
        own_session: Whether it leads a session and a process group of its own.
        outlives: Whether it runs on when its owner ends, which sends it SIGTERM otherwise.
    """

    module: str
    arguments: list[str]
    owner: int
    environment: dict[str, str]
    folder: str
    cores: list[int] = []
    own_session: bool = True
    outlives: bool = False


class ProgramStarted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request: the program's pid, or why there is none."""

    pid: int = 0
    error: str = ""


class ForkServer:
    """The owner's side. Thread-safe; calls block for the time of a fork, the first one until all is imported."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self.pid = pid

    @classmethod
    def open(cls, preload: Sequence[str], log: Path | None = None) -> ForkServer | None:
        """Forks the fork server from this process, which must have one thread; None where the system cannot do it.

        Args:
            preload: Modules that it imports, and functions that it calls (``module:function``), before it answers; what
                this process has imported it has already.
            log: File that what it prints is appended to; None for this process's own output.
        """
        if sys.platform != "linux" or threading.active_count() > 1:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)  # a cluster that starts for the first time has no folder yet
        _flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run(theirs, owner, preload, log)
        theirs.close()
        ours.settimeout(ANSWER_LIMIT_S)
        return cls(ours, pid)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        output: int,
        cores: Sequence[int] = (),
        own_session: bool = True,
        outlives: bool = False,
        environment: dict[str, str] | None = None,
    ) -> int:
        """Starts a program in this process's folder, by default with its environment; returns its pid.

        Args:
            output: Descriptor for its standard output and error; its standard input is empty.

        Raises:
            ForkServerLost: it was not started.
        """
        request = ProgramRequest(
            module=module,
            arguments=list(arguments),
            owner=os.getpid(),
            environment=dict(os.environ) if environment is None else environment,
            folder=os.getcwd(),
            cores=list(cores),
            own_session=own_session,
            outlives=outlives,
        )
        message = msgspec.json.encode(request)
        if len(message) > REQUEST_BYTES_MAX:
            raise ForkServerLost(f"the request has {len(message)} bytes, {REQUEST_BYTES_MAX} are the limit")
        with self._lock:
            answer = self._ask(message, output)
        if answer.error:
            raise ForkServerLost(answer.error)
        return answer.pid

    def _ask(self, message: bytes, output: int) -> ProgramStarted:
        """Asks while this process takes in orphans."""
        _take_in_orphans(1)
        try:
            socket.send_fds(self._socket, [message], [output])
            answer = self._socket.recv(ANSWER_BYTES_MAX)
        except OSError as error:
            self._socket.close()  # an answer that comes late must not be taken for the next one's
            raise ForkServerLost(str(error)) from None
        finally:
            _take_in_orphans(-1)
        if not answer:
            raise ForkServerLost("the fork server ended")
        return msgspec.json.decode(answer, type=ProgramStarted)

    def close(self) -> None:
        """Ends the fork server, which may still import, and reads its status. Programs that it started run on."""
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ChildProcessError, ProcessLookupError):
            pass  # its status was read already
        self._socket.close()


def _take_in_orphans(change: int) -> None:
    global _asking  # noqa: PLW0603 - being a subreaper is process-wide
    with _asking_lock:
        _asking += change
        _prctl(_PR_SET_CHILD_SUBREAPER, int(_asking > 0))


def _run(sock: socket.socket, owner: int, preload: Sequence[str], log: Path | None) -> NoReturn:
    """The fork server's process: imports, then answers until the owner hangs up."""
    code = 1
    try:
        os.setsid()  # Ctrl-C in a terminal is for the owner, which then ends in order
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        set_title("millrace: fork server", "fork server")
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        gc.disable()  # it would look at all that was imported again and again: a sixth of vLLM's import
        for name in preload:
            module, _, function = name.partition(":")
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
        _refuse_threads()
        gc.freeze()  # without a collection, half a second of it: children share what it would free
        gc.enable()
        if os.getppid() == owner:
            _serve(sock)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may unwind into the owner's code
        sys.excepthook(*sys.exc_info())
    finally:
        _flush()
        os._exit(code)


def _refuse_threads() -> None:
    """Raises RuntimeError where the imports left a thread. A first fork ends those of OpenBLAS, which numpy loads."""
    first = os.fork()
    if first == 0:
        os._exit(0)
    os.waitpid(first, 0)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after the imports: forking is not safe")


def _serve(sock: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, 1)
        if not message:
            return
        try:
            started = _start(sock, msgspec.json.decode(message, type=ProgramRequest), descriptors[0])
        except OSError as error:
            started = ProgramStarted(error=f"it could not fork: {error}")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        sock.send(msgspec.json.encode(started))


def _start(sock: socket.socket, request: ProgramRequest, output: int) -> ProgramStarted:
    """Forks twice; the process between tells the program's pid and ends."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        program = 0
        try:
            program = os.fork()
            if program == 0:
                for descriptor in (reading, writing, sock.detach()):
                    os.close(descriptor)
                _become(request, output)
            os.write(writing, program.to_bytes(4, "little"))
        finally:
            os._exit(0 if program else 1)
    os.close(writing)
    told = os.read(reading, 4)
    os.close(reading)
    os.waitpid(between, 0)
    if len(told) < 4:
        return ProgramStarted(error="it could not fork")
    return ProgramStarted(pid=int.from_bytes(told, "little"))


def _become(request: ProgramRequest, output: int) -> NoReturn:
    """The program's process: takes on what the request says, runs the module, and never returns."""
    code: int = 1
    try:
        if not _adopted(request.owner, outlives=request.outlives):
            os._exit(1)
        if request.own_session:
            os.setsid()
        _take_streams(output)
        os.chdir(request.folder)
        os.environ.clear()
        os.environ.update(request.environment)
        if request.cores:
            os.sched_setaffinity(0, request.cores)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        command = [sys.executable, "-m", request.module, *request.arguments]
        set_title(" ".join(command))
        if request.folder not in sys.path:
            sys.path.insert(0, request.folder)
        sys.argv = [request.module, *request.arguments]
        code = run_module(request.module)
    except BaseException:  # noqa: BLE001 - nothing may unwind into the fork server's code
        sys.excepthook(*sys.exc_info())
    finally:
        _end(code)


def run_module(module: str) -> int:
    """Run a module as ``python -m`` does; returns the exit status that the interpreter would end with."""
    for name in (module, f"{module}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):  # a module that runs is not imported as well
            sys.modules.pop(name, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return 130
    return 0


def _end(code: int) -> NoReturn:
    """Ends as the interpreter does, but without its tear-down of modules that others share."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()
    finally:
        os._exit(code)


def _adopted(owner: int, *, outlives: bool) -> bool:
    """Whether the owner has become the parent; this process then ends with it, unless it outlives it."""
    until_s = time.monotonic() + ADOPTION_LIMIT_S
    while os.getppid() != owner:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.0002)
    if not outlives:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == owner


def _take_streams(output: int) -> None:
    """Standard input from nowhere, output and error to the descriptor, whatever Python's streams were before."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    if output > 2:
        os.close(output)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def set_title(text: str, name: str = Path(sys.executable).name) -> None:
    """Sets what ``ps`` shows: the command line, and the short name."""
    try:
        from setproctitle import setproctitle, setthreadtitle
    except ImportError:
        return  # no wheel for this platform: the former title stays
    setproctitle(text)
    setthreadtitle(name)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
