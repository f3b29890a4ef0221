"""Liveness of an engine process: it writes a sign of life into shared memory, its worker judges the age.

A thread of the engine process writes, so that a long step (a prefill, a kernel) does not look like a hang: the
interpreter runs threads while the device or a kernel computes. A process that is stopped, swapped out or holds the
interpreter writes nothing. A step that does not end although the process lives is told apart by its own begin.

A process that wants to compute and gets no core writes nothing either: on a machine with too much to do that may take
seconds, and its sequences would only be computed anew where it is no better. So while it waits for a core silence does
not grow; it does by the CPU time that it uses.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from millrace.actor.engine import SIGN_OVERDUE_NS, EngineLiveness

from services.worker.vllm_engine.snapshot_buffer import SnapshotWriter

#: Interval of the signs of life, seconds. One costs a few microseconds.
BEAT_S = 0.05
#: A step is a long one from here.
LONG_STEP_NS = 250_000_000
#: Unit of CPU times in /proc.
_CLOCK_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def start_beating(writer: SnapshotWriter) -> threading.Thread:
    """Starts the engine's side. The thread ends with the process."""

    def beat() -> None:
        while True:
            writer.beat(time.monotonic_ns())
            time.sleep(BEAT_S)

    thread = threading.Thread(target=beat, name="millrace-liveness", daemon=True)
    thread.start()
    return thread


def cpu_time_ns(pid: int) -> int | None:
    """CPU time of a process that computes or waits for a core. None of one that is stopped or waits for anything else,
    and where the system does not tell.
    """
    try:
        state, *words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[10]) + int(words[11])) * _CLOCK_TICK_NS if state == "R" else None


class LivenessJudge:
    """The worker's side: turns ages into EngineLiveness, once for each change.

    Both signs have to be overdue at two looks in a row: a worker that was itself held up sees an old sign once.
    """

    def __init__(self) -> None:
        self._told = (0, 0)
        self._suspected = False
        self._beat_ns = self._silence_ns = self._look_ns = 0
        self._cpu_ns: int | None = None

    def judge(
        self, signs: tuple[int, int], monotonic_ns: int, unix_ns: int, cpu_ns: int | None = None
    ) -> EngineLiveness | None:
        """Liveness to report now; None where nothing changed.

        Args:
            signs: ``SnapshotReader.signs()``.
            cpu_ns: ``cpu_time_ns`` of the engine process.
        """
        beat_ns, step_ns = signs
        silent = self._silent_for(beat_ns, monotonic_ns, cpu_ns) > SIGN_OVERDUE_NS
        long = step_ns > 0 and monotonic_ns - step_ns > LONG_STEP_NS
        first_look, self._suspected = (silent or long) and not self._suspected, silent or long
        if first_look:
            return None
        offset = unix_ns - monotonic_ns
        signs_now = (monotonic_ns - self._silence_ns if silent else 0, step_ns if long else 0)
        if signs_now == self._told:
            return None
        self._told = signs_now
        silent_since, step_since = (sign + offset if sign else 0 for sign in signs_now)
        return EngineLiveness(silent_since_ns=silent_since, step_since_ns=step_since)

    def _silent_for(self, beat_ns: int, now_ns: int, cpu_ns: int | None) -> int:
        """Time without a sign, less what the process waited for a core of it; 0 before the first sign."""
        passed_ns = now_ns - max(beat_ns, self._look_ns)
        if cpu_ns is not None and self._cpu_ns is not None:
            passed_ns = min(passed_ns, cpu_ns - self._cpu_ns)
        before_ns = self._silence_ns if beat_ns == self._beat_ns else 0
        self._beat_ns, self._look_ns, self._cpu_ns = beat_ns, now_ns, cpu_ns
        self._silence_ns = before_ns + passed_ns if beat_ns else 0
        return self._silence_ns
