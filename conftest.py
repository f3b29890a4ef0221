"""Rules for every test: the marker of its folder, no I/O in pure folders, why an engine test is skipped."""

import asyncio
import atexit
import gc
import importlib.util
import shutil
import socket
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent
TESTS = ROOT / "tests"
#: In the order in which they run: what is quick to fail comes first.
FOLDERS = ("tidy", "unit", "sim", "papers", "contract", "live", "engine", "gpu", "compose", "clients")

#: Folders whose tests touch no socket, no clock and never sleep.
PURE_FOLDERS = ("unit", "sim", "papers")

#: What code of this repository may not call there. Third-party code may (asyncio's loop reads the clock, for one).
CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep")
OURS = ("millrace", "services", "simulator", "papers", "tests", "test_")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders that cannot even be imported here, or that run only where they are named."""
    if collection_path == TESTS / "compose":
        # It builds images and starts containers: `./task test:compose`.
        return True if not any("compose" in argument for argument in config.args) else None
    if collection_path == TESTS / "clients":
        return True  # its libraries lie in another environment: `./task test:clients`
    if collection_path in (TESTS / "engine", TESTS / "gpu") and _why_no_engine():
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = _folder_of(item)
        if folder not in FOLDERS:
            raise pytest.UsageError(f"{item.path} lies in none of tests/{{{','.join(FOLDERS)}}}")
        item.add_marker(getattr(pytest.mark, folder))
        if folder == "gpu" and shutil.which("nvidia-smi") is None:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here (nvidia-smi was not found)"))
    items.sort(key=lambda item: FOLDERS.index(_folder_of(item)))


def pytest_collection_finish() -> None:
    _keep_for_good()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        _keep_for_good()


def _keep_for_good() -> None:
    """Freeze what is alive between two files: later collections, of which each simulated run makes one, pass it by."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    # The interpreter frees what was frozen; libraries would complain of leaks behind pytest's last line. Not in
    # pytest_unconfigure: pytest collects all of it five times after that.
    atexit.register(gc.unfreeze)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reason = _why_no_engine()
    if reason:
        terminalreporter.write_line(f"tests/engine and tests/gpu were not run: {reason}")


def _folder_of(item: pytest.Item) -> str:
    inside = item.path.relative_to(ROOT).parts
    return inside[1] if inside[0] == "tests" else inside[0]


def _why_no_engine() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "real vLLM is not installed here; `./task setup` installs it (MILLRACE_ENGINE_EXTRA must not be none)"
    return None


@pytest.fixture(autouse=True)
def _no_io_in_pure_folders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pure folders a socket that leaves the process, the wall clock or a sleep fails the test that reached it.

    A socketpair stays allowed: an asyncio event loop cannot be made without one, and it reaches nobody.
    """
    folder = _folder_of(request.node)
    if folder not in PURE_FOLDERS:
        return
    for name in ("connect", "connect_ex", "bind", "listen", "sendto"):
        monkeypatch.setattr(socket.socket, name, _refuse(f"socket.{name}", folder))
    for name in CLOCKS:
        monkeypatch.setattr(time, name, _refuse_ours(getattr(time, name), f"time.{name}", folder))
    monkeypatch.setattr(asyncio, "sleep", _sleep_zero_only(asyncio.sleep, folder))


def _refuse(what: str, folder: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        pytest.fail(f"{what} was called in tests/{folder}, which is for code without I/O (tests/live is for the rest)")

    return refuse


def _refuse_ours(real: Callable[..., Any], what: str, folder: str) -> Callable[..., Any]:
    def guarded(*arguments: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(OURS):
            pytest.fail(f"{caller} called {what} in tests/{folder}: time is passed in as now_ns")
        return real(*arguments)

    return guarded


def _sleep_zero_only(real: Callable[..., Any], folder: str) -> Callable[..., Any]:
    async def sleep(delay: float, result: Any = None) -> Any:
        if delay > 0:
            pytest.fail(f"asyncio.sleep({delay}) was called in tests/{folder}: time is virtual here")
        return await real(0, result)

    return sleep
