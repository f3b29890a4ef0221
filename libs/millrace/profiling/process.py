"""An engine that is profiled in a process of its own: one JSON document a line, rounds in, records out.

The child says ``Profiled`` first, then a ``RoundRecord`` for each ``Round``, and ends when its input does. Real vLLM
lives in such a child (services/worker/profile.py), since libraries import neither services nor vLLM.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import msgspec

from millrace.profiling.records import Profiled, Round, RoundRecord

#: How long the child has for ending by itself, s.
END_TIMEOUT_S = 20.0


class EngineProcessDied(Exception):
    """The child ended, or said something else; what it wrote to standard error says why."""


class ProcessProfile:
    """Implements ProfilePort over a child's pipes."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts the child and waits until its engine is ready.

        Raises:
            EngineProcessDied: it did not come up.
        """
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._records = msgspec.json.Decoder(RoundRecord)
        self._profiled = msgspec.json.decode(self._line("start"), type=Profiled)

    def profiled(self) -> Profiled:
        return self._profiled

    def run(self, load: Round) -> RoundRecord:
        """Runs one round.

        Raises:
            EngineProcessDied: it did not answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(load) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineProcessDied(self._ended(load.name)) from error
        return self._records.decode(self._line(load.name))

    def _line(self, during: str) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineProcessDied(self._ended(during))
        return line

    def _ended(self, during: str) -> str:
        return f"the engine's process ended during {during} (exit code {self._process.wait(END_TIMEOUT_S)})"

    def close(self) -> None:
        """Ends the child: its input is closed, then, if that is not enough, it is killed. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
