"""Slow work of a service in a nice child process: a function of one Struct whose result is another one.

``python -m millrace.actor.child_process MODULE:FUNCTION`` reads the argument from stdin, writes the result to stdout.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar, get_type_hints

import msgspec

#: Characters kept of a child's complaint.
DETAIL_MAX = 500

#: Serving goes first.
NICENESS = 10

J = TypeVar("J", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)


async def run_in_child(function: Callable[[J], R], job: J) -> R:
    """Run a function of a module on a job. Cancelling it kills the child.

    Raises:
        ChildProcessError: it failed; the text is the end of its complaint.
        OSError: it could not be started.
    """
    words = ("-m", __name__, f"{function.__module__}:{function.__name__}")
    output = await run_python(*words, given=msgspec.msgpack.encode(job), niceness=NICENESS)
    result: R = msgspec.msgpack.decode(output, type=get_type_hints(function)["return"])
    return result


async def run_python(*words: str, given: bytes = b"", niceness: int) -> bytes:
    """Run Python with these arguments on one thread, with something on its standard input; return what it prints.
    Cancelling kills it.

    Raises:
        ChildProcessError, OSError: as ``run_in_child``.
    """
    child = await asyncio.create_subprocess_exec(
        "nice",
        f"-n{niceness}",
        sys.executable,
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


def main() -> int:
    """The child; 1 with a sentence on standard error where the function cannot do it."""
    module, _, name = sys.argv[1].partition(":")
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
