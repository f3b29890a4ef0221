"""Order of what an actor sees: its clock never goes back, and after its end nothing comes."""

from __future__ import annotations

from millrace.actor.effects import Effect, Stop
from millrace.contracts.message import Message
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess


class NoMessageAfterStop(Checker):
    """An incarnation that returned Stop, or was killed, handles nothing more."""

    def __init__(self) -> None:
        self._stopped: set[tuple[str, int]] = set()

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        key = (process.name, process.incarnation)
        assert key not in self._stopped, f"{process.name} handled {message} after its end"
        assert process.alive, f"{process.name} handled {message} though it was killed"
        for effect in effects:
            if type(effect) is Stop:
                self._stopped.add(key)


class TimeNeverGoesBack(Checker):
    """``now_ns`` rises or stands for each incarnation, and over incarnations of one actor."""

    def __init__(self) -> None:
        self._last_ns: dict[str, int] = {}

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        now_ns = process.now_ns
        assert now_ns >= self._last_ns.get(process.name, 0), f"time went back for {process.name}"
        self._last_ns[process.name] = now_ns
