"""Unix time that never steps, the same in all processes that a supervisor starts.

It is the monotonic clock and a difference that is fixed once. Were it fixed by each process, one that starts after the
system's clock was set back would have an older incarnation than the process that it replaces, and one that starts after
it was set forward would find every deadline past. So the supervisor hands its own to what it starts.
"""

from __future__ import annotations

import os
import time

#: Environment variable with the difference, ns.
VARIABLE = "MILLRACE_CLOCK_OFFSET_NS"

_offset_ns = 0


def unix_ns() -> int:
    """Time now, unix ns."""
    return (_offset_ns or share()) + time.monotonic_ns()


def share(kept_ns: int = 0) -> int:
    """Fixes the difference, and hands it to the processes that this one starts; returns it.

    Args:
        kept_ns: That of processes which run already, of this boot; 0 for the one of the environment, else a new one.
    """
    global _offset_ns  # noqa: PLW0603  # of the process, as the system's clock is
    _offset_ns = kept_ns or _offset_ns or int(os.environ.get(VARIABLE) or time.time_ns() - time.monotonic_ns())
    os.environ[VARIABLE] = str(_offset_ns)
    return _offset_ns
