"""Running other programs and waiting, each with a limit; what goes wrong becomes one exception."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose"

#: Building the worker's image installs vLLM: ten minutes on two busy cores.
BUILD_SECONDS_MAX = 2400
CALL_SECONDS_MAX = 180


class Failed(Exception):
    """A check did not hold, or a step could not be done."""


def call(
    command: list[Any],
    *,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    limit_s: float = CALL_SECONDS_MAX,
) -> str:
    """Runs a program; returns its standard output.

    Raises:
        Failed: it ended with another status than 0 (unless ``check`` is false) or not in time.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"{_short(words)}: not done within {limit_s:.0f} s") from None
    if check and done.returncode:
        raise Failed(f"{_short(words)} ended with {done.returncode}: {(done.stderr + done.stdout)[-2000:]}")
    return done.stdout


def succeeds(command: list[Any], *, limit_s: float = 30) -> bool:
    """Whether a program ends with status 0."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def wait(what: str, limit_s: float, holds: Callable[[], Any]) -> float:
    """Waits until something holds; returns how long that took, seconds.

    Raises:
        Failed: it did not within the limit.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > limit_s:
            raise Failed(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - began


def say(what: str) -> None:
    """One line of progress."""
    print(f"test:compose: {what}", flush=True)


def _short(words: list[str]) -> str:
    """The command without paths and passwords."""
    return " ".join(word for word in words if not word.startswith(("/", "--password=")))[:160] or words[0]
