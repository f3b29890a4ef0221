"""Slow work of a service in a child process: a module that reads its job from stdin and writes its result to stdout."""

from __future__ import annotations

import asyncio
import os
import sys

#: Characters kept of a child's complaint.
DETAIL_MAX = 500


async def run_in_child(module: str, job: bytes) -> bytes:
    """Run ``python -m module`` on a job and return its result. Cancelling it kills the child.

    Raises:
        ChildProcessError: it failed; the text is the end of its complaint.
        OSError: it could not be started.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        output, complaint = await child.communicate(job)
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode != 0:
        raise ChildProcessError(complaint.decode(errors="replace").strip()[-DETAIL_MAX:])
    return output
