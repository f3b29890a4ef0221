"""Liveness of an engine process: it writes a sign of life into shared memory, its worker judges the age.

A thread of the engine process writes, so that a long step (a prefill, a kernel) does not look like a hang: the
interpreter runs threads while the device or a kernel computes. A process that is stopped, swapped out or holds the
interpreter writes nothing. A step that does not end although the process lives is told apart by its own begin.
"""

from __future__ import annotations

import threading
import time

from millrace.actor.engine import SIGN_OVERDUE_NS, EngineLiveness

from services.worker.vllm_engine.snapshot_buffer import SnapshotWriter

#: Interval of the signs of life, seconds. One costs a few microseconds.
BEAT_S = 0.05
#: A step is a long one from here.
LONG_STEP_NS = 250_000_000


def start_beating(writer: SnapshotWriter) -> threading.Thread:
    """Starts the engine's side. The thread ends with the process."""

    def beat() -> None:
        while True:
            writer.beat(time.monotonic_ns())
            time.sleep(BEAT_S)

    thread = threading.Thread(target=beat, name="millrace-liveness", daemon=True)
    thread.start()
    return thread


class LivenessJudge:
    """The worker's side: turns ages into EngineLiveness, once for each change.

    Both signs have to be overdue at two looks in a row: a worker that was itself held up sees an old sign once.
    """

    def __init__(self) -> None:
        self._told = (0, 0)
        self._suspected = False

    def judge(self, signs: tuple[int, int], monotonic_ns: int, unix_ns: int) -> EngineLiveness | None:
        """Liveness to report now; None where nothing changed.

        Args:
            signs: ``SnapshotReader.signs()``.
        """
        beat_ns, step_ns = signs
        silent = beat_ns > 0 and monotonic_ns - beat_ns > SIGN_OVERDUE_NS
        long = step_ns > 0 and monotonic_ns - step_ns > LONG_STEP_NS
        first_look, self._suspected = (silent or long) and not self._suspected, silent or long
        if first_look:
            return None
        offset = unix_ns - monotonic_ns
        signs_now = (beat_ns if silent else 0, step_ns if long else 0)
        if signs_now == self._told:
            return None
        self._told = signs_now
        silent_since, step_since = (sign + offset if sign else 0 for sign in signs_now)
        return EngineLiveness(silent_since_ns=silent_since, step_since_ns=step_since)
