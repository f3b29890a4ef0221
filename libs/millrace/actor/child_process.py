"""Slow work of a service in a nice child process that ends with it, however it ends: a module that is run, or a
function of one Struct whose result is another one.

``python -m millrace.actor.child_process PARENT MODULE ARGUMENTS`` runs a module for the process of that number.
``... PARENT MODULE:FUNCTION`` reads the function's argument from stdin, writes the result to stdout.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TypeVar, get_type_hints

import msgspec

#: Characters kept of a child's complaint.
DETAIL_MAX = 500

#: Serving goes first.
NICENESS = 10

_PR_SET_PDEATHSIG = 1

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


async def run_in_child(function: Callable[[J], R], job: J) -> R:
    """Run a function of a module on a job. Cancelling it kills the child.

    Raises:
        ChildProcessError: it failed; the text is the end of its complaint.
        OSError: it could not be started.
    """
    name = f"{function.__module__}:{function.__name__}"
    output = await run_python(name, given=msgspec.msgpack.encode(job), niceness=NICENESS)
    result: R = msgspec.msgpack.decode(output, type=get_type_hints(function)["return"])
    return result


async def run_python(module: str, *words: str, given: bytes = b"", niceness: int) -> bytes:
    """Run a module with these arguments on one thread, with something on its standard input; return what it prints.
    Cancelling kills it.

    Raises:
        ChildProcessError, OSError: as ``run_in_child``.
    """
    child = await asyncio.create_subprocess_exec(
        "nice",
        f"-n{niceness}",
        sys.executable,
        "-m",
        __name__,
        str(os.getpid()),
        module,
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        output, complaint = await child.communicate(given)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        raise ChildProcessError(complaint.decode(errors="replace").strip()[-DETAIL_MAX:])
    return output


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, however it ends. Linux only; elsewhere nothing.

    The signal follows the *thread* that forked: workers fork from their main thread, event loops from their own.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def leave_session(niceness: int) -> None:
    """Give this process a session of its own that is so nice.

    Where the kernel shares cores among sessions (autogroup, on by default), niceness counts inside of one only: one
    busy process of a session, however nice, gets as much of a core as another session whole.
    """
    with suppress(OSError):  # a kernel without such groups, or a process that may not
        if os.getsid(0) != os.getpid():
            os.setsid()
        Path("/proc/self/autogroup").write_text(str(niceness))


def main() -> int:
    """The child."""
    parent, module, *words = sys.argv[1:]
    die_with_parent()
    if os.getppid() != int(parent):  # it ended before this process asked
        return 1
    leave_session(os.nice(0))
    if ":" in module:
        return _call(module)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _call(path: str) -> int:
    """1 with a sentence on standard error where the function cannot do it."""
    module, _, name = path.partition(":")
    function = getattr(import_module(module), name)
    kind = next(iter(get_type_hints(function).values()))
    try:
        result = function(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=kind))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201  # to the process that waits for the result
        return 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
