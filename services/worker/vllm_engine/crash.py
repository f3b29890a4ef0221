"""The end of an engine process that nobody asked for, as its worker tells it.

vLLM raises in whatever waits for the engine; ``VllmEngine`` turns the first of these into ``EngineFailed``. An engine
that hangs raises nothing: ``hangs.py``.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess

from vllm.v1.engine.exceptions import EngineDeadError


def crash_text(error: BaseException, process: BaseProcess) -> str:
    """The cause, and how the engine's process ended if it did."""
    ended = f"; engine process {process.pid} ended with {process.exitcode}" if process.exitcode is not None else ""
    dead = isinstance(error, EngineDeadError)
    return ("the engine process is dead" if dead else f"{type(error).__name__}: {error}") + ended
