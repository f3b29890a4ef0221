"""The end of an engine process that nobody asked for, or its failed start, as its worker tells it.

vLLM raises in whatever waits for the engine; ``VllmEngine`` turns the first of these into ``EngineFailed``. An engine
that hangs raises nothing: ``hangs.py``.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess

from pydantic import ValidationError
from vllm.v1.engine.exceptions import EngineDeadError


def crash_text(error: BaseException, process: BaseProcess) -> str:
    """The cause, and how the engine's process ended if it did."""
    ended = f"; engine process {process.pid} ended with {process.exitcode}" if process.exitcode is not None else ""
    dead = isinstance(error, EngineDeadError)
    return ("the engine process is dead" if dead else f"{type(error).__name__}: {error}") + ended


def refusal_text(error: Exception) -> str:
    """Return why vLLM did not start, without pydantic's dump of the arguments."""
    text = str(error)
    if isinstance(error, ValidationError):
        text = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    return f"{type(error).__name__}: {text}"
