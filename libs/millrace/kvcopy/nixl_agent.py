"""One NIXL agent with the UCX backend, owned and closed by one copier. The only file that imports nixl; the package is
optional, and ``why_not`` says what is missing.

What NIXL does that one has to know (1.5.1): between processes of one host ``post`` itself copies, before it returns;
over TCP the passive side must make progress; its progress thread would do that by burning a core, so it is
off and a thread that looks every 20 ms does it; the first read of a peer takes 20 to 120 ms of hand-shakes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from millrace.kvcopy.copier_port import CopierError, CopyPlan, Offsets

State = Literal["DONE", "PROC", "ERR"]

#: How often the passive side makes progress. A look costs 4 µs and waking up more; a wire-up takes five or so.
TEND_S = 0.02


def why_not() -> str:
    """Return the reason why NIXL cannot be used in this Python; empty where it can."""
    try:
        _api()
    except ImportError as missing:
        return f"the nixl package is not usable here: {missing}"
    return ""


def _api() -> Any:
    """Imports NIXL's module, without torch if torch is a CPU build.

    NIXL imports torch only to read its CUDA version, which a CPU build does not have. The import takes one to two
    seconds of processor time and 190 MB.
    """
    hidden = "torch" not in sys.modules and _torch_is_for_cpus()
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("nixl._api")
    finally:
        if hidden:
            del sys.modules["torch"]


def _torch_is_for_cpus() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


class NixlAgent:
    """Threads take turns at it: the owner's calls, and its own that tends to peers. Every error is a CopierError.

    Attributes:
        lock: Held during each call; hold it around several that belong together.
    """

    def __init__(self, name: str) -> None:
        """Makes one (half a second). Raises CopierError: NIXL or its UCX backend is not usable here."""
        if reason := why_not():
            raise CopierError(reason)
        # UCX's plugin for AWS's network loads the system's libnl beside the one in NIXL's wheel; where Debian's RDMA
        # packages are installed every process that had an agent then dies at exit. Whoever has that network sets it.
        os.environ.setdefault("UCX_MODULES", "^efa")
        api = _api()
        self._errors = _errors_of(importlib.import_module("nixl._bindings"))
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells every agent's birth on stderr
        self.lock = threading.RLock()
        self._registered: list[Any] = []
        self._name = name
        with self._guarded("no NIXL agent can be made"):
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(name, settings)
        if "UCX" not in self._agent.backends:
            raise CopierError("NIXL has no UCX backend here")
        self._ended = threading.Event()
        self._tender = threading.Thread(target=self._tend, args=(TEND_S,), name="nixl-tend", daemon=True)
        self._tender.start()
        # A thread that is inside of NIXL when the interpreter ends is unwound through C++, and that ends in SIGABRT.
        atexit.register(self._end_tender)

    def register(self, *, address: int, size: int, device: int) -> None:
        """Makes memory readable by peers and usable as a target, once and until ``close``."""
        with self._guarded("the KV region cannot be registered with NIXL"):
            row = [(address, size, max(device, 0), "")]
            self._registered.append(self._agent.register_memory(row, _memory_type(device)))

    def metadata(self) -> bytes:
        with self._guarded("NIXL has no metadata of its own agent"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Learns of a peer; returns its name. Nothing is connected yet. The agent itself it knows."""
        if metadata == self.metadata():
            return self._name
        with self._guarded("the peer's NIXL metadata cannot be used"):
            name = self._agent.add_remote_agent(metadata)
            return str(name.decode() if isinstance(name, bytes) else name)

    def connect(self, peer: str) -> None:
        """Begins to connect; the first read finishes it."""
        if peer == self._name:
            return
        with self._guarded(f"no NIXL connection to {peer}"):
            self._agent.make_connection(peer)

    def knows(self, peer: str) -> bool:
        """Whether it is still there, as far as NIXL has heard: it forgets those whose connection broke."""
        self.tend()
        with self._guarded(f"{peer} cannot be looked up"):
            return bool(self._agent.check_remote_metadata(peer))

    def remove_peer(self, peer: str) -> None:
        """Disconnects and forgets. A peer that is gone already is no error."""
        if peer == self._name:
            return
        with contextlib.suppress(CopierError), self._guarded(f"{peer} cannot be removed"):
            self._agent.remove_remote_agent(peer)

    def make_read(
        self, peer: str, *, source: Offsets, target: Offsets, lengths: Offsets, devices: tuple[int, int]
    ) -> Any:
        """A read request; ``source`` and ``target`` are addresses, ``devices`` theirs. Release it with ``release``."""
        with self._guarded(f"NIXL refuses to read from {peer}"):
            there = self._agent.get_xfer_descs(_rows(source, lengths, devices[0]), _memory_type(devices[0]))
            here = self._agent.get_xfer_descs(_rows(target, lengths, devices[1]), _memory_type(devices[1]))
            return self._agent.initialize_xfer("READ", here, there, peer)

    def post(self, request: Any) -> State:
        """Starts it; on one host it is over when this returns."""
        return self._state(lambda: self._agent.transfer(request))

    def look(self, request: Any) -> State:
        """Makes progress and says how it stands."""
        return self._state(lambda: self._agent.check_xfer_state(request))

    def release(self, request: Any) -> None:
        """Gives up a request. Raises CopierError: it is still under way and cannot be stopped."""
        with self._guarded("a NIXL read cannot be released"):
            request.release()

    def tend(self) -> None:
        """Lets passive work go on: hand-shakes, and reads that peers make over TCP. Cheap where there is none."""
        with contextlib.suppress(CopierError), self._guarded("no progress"):
            self._agent.get_new_notifs()  # no notes are sent; one that came would be dropped here

    def close(self) -> None:
        """Stops the thread, deregisters, destroys the agent. Requests and peers must be given up before. Idempotent."""
        self._end_tender()
        atexit.unregister(self._end_tender)
        with self.lock:
            for registered in self._registered:
                with contextlib.suppress(CopierError), self._guarded("a region cannot be deregistered"):
                    self._agent.deregister_memory(registered)
            self._registered.clear()
            self._agent = None

    def _end_tender(self) -> None:
        self._ended.set()
        if self._tender is not threading.current_thread():
            self._tender.join()

    def _tend(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            self.tend()

    def _state(self, call: Callable[[], str]) -> State:
        with self._guarded("a NIXL read failed"):
            state = call()
        if state not in ("DONE", "PROC"):
            raise CopierError("a NIXL read failed")
        return "DONE" if state == "DONE" else "PROC"

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        with self.lock:
            try:
                yield
            except self._errors as failure:
                raise CopierError(f"{what}: {type(failure).__name__} {failure}".rstrip()) from failure


def _rows(addresses: Offsets, lengths: Offsets, device: int) -> Any:
    """NIXL's descriptors, shape (n, 3): address, bytes, device."""
    return np.stack([addresses, lengths, np.full(len(lengths), max(device, 0))], axis=1).astype(np.uint64)


def _memory_type(device: int) -> str:
    return "DRAM" if device < 0 else "VRAM"


def _errors_of(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions have no base of their own."""
    named = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*(kind for kind in named if isinstance(kind, type) and issubclass(kind, Exception)), RuntimeError)


def addresses(plan: CopyPlan, *, source: int, target: int) -> tuple[Offsets, Offsets]:
    """A plan's offsets as addresses in regions that begin there."""
    return plan.source + source, plan.target + target
