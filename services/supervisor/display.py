"""Output of `up`: progress of the start, then addresses and folders, later processes that die and come back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from millrace.actor.config import BusConfig
from millrace.cluster.spec import NatsSpec
from millrace.supervision.cluster_folder import command, shown
from millrace.supervision.joining import TOKEN
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.supervisor.state import ChildState

_STYLES = {ChildState.READY: "green", ChildState.BACKING_OFF: "red", ChildState.STARTING: "yellow"}

#: Children shown by name while starting; the rest is summed up, so that 64 of them do not fill the screen.
ROWS_MAX = 14

#: A start that is quiet for so long says what it waits for, where no terminal shows it; and so many by name.
QUIET_S, NAMES_MAX = 10.0, 4

Snapshot: TypeAlias = Callable[[], dict[str, Any]]
Clock: TypeAlias = Callable[[], float]


class Display:
    """Draws the start on a terminal; prints a line per change elsewhere."""

    def __init__(self, snapshot: Snapshot, *, title: str, logs: Path, clock_s: Clock = time.monotonic) -> None:
        self._snapshot, self._title, self._logs, self._clock_s = snapshot, title, logs, clock_s
        self._said_s, self._starts = 0.0, True
        self._console = Console(file=sys.stdout, highlight=False)
        self._began = clock_s()
        self._live: Live | None = None
        self._said: dict[str, str] = {}

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(self._draw(), console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the drawing away; from then on, changes are printed."""
        self._starts = False
        if self._live is not None:
            self._said = {name: str(child["state"]) for name, child in self._snapshot().items()}
            self._live.stop()
            self._live = None

    def update(self) -> None:
        if self._live is not None:
            self._live.update(self._draw())
            return
        for name, child in self._snapshot().items():
            state = str(child["state"])
            if self._said.get(name) != state and state in (ChildState.READY, ChildState.BACKING_OFF):
                extra = f" ({child['last_exit']})" if child["last_exit"] and state != ChildState.READY else ""
                self._say_at(f"{name} {state}{extra}")
            self._said[name] = state
        if self._starts and self.elapsed_s - self._said_s >= QUIET_S:
            stops = [name for name, state in self._said.items() if state == ChildState.STOPPING]
            late = stops or [name for name, state in self._said.items() if state != ChildState.READY]
            does = "stopping" if stops else "waiting for"
            rest = f" and {len(late) - NAMES_MAX} more" * (len(late) > NAMES_MAX)
            self._say_at(f"{does} {', '.join(late[:NAMES_MAX]) or 'the API'}{rest}; logs: {shown(self._logs)}")

    def _say_at(self, text: str) -> None:
        self._said_s = self.elapsed_s
        self._console.print(f"  {self._said_s:5.1f} s  {text}", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    @property
    def elapsed_s(self) -> float:
        return self._clock_s() - self._began

    def _draw(self) -> RenderableType:
        children = self._snapshot()
        table = Table.grid(padding=(0, 2))
        for name, child in list(children.items())[:ROWS_MAX]:
            state = ChildState(child["state"])
            actors = f"{child['present']}/{child['expected']}" if child["expected"] > 1 else ""
            detail = child["last_exit"] if state is ChildState.BACKING_OFF else actors
            table.add_row(Text(name), Text(str(state), style=_STYLES.get(state, "dim")), Text(detail, style="dim"))
        ready = sum(child["state"] == ChildState.READY for child in children.values())
        head = Spinner("dots", text=f"{self._title}: {ready} of {len(children)} ready, {self.elapsed_s:.1f} s")
        return Group(head, table)


def banner(
    *,
    url: str,
    page: str,
    models: list[str],
    directory: Path,
    nats_url: str,
    took_s: float,
    keys: bool,
    objectives: str,
) -> str:
    """Text that is printed once everything is ready.

    Args:
        page: URL of the page that shows requests move; empty where there is none.
        took_s: From the start until everything was ready.
        keys: Whether the API asks for keys.
        objectives: That the autopilot advises for; empty where it is off.
    """
    key = ' -H "Authorization: Bearer $MILLRACE_API_KEY"' if keys else ""
    message = '{"role": "user", "content": "Say the word cup 9 times."}'
    body = f'{{"model": "{models[0]}", "stream": true, "messages": [{message}]}}'
    folder = shown(directory)
    advice = [f"  advice   in status, after minutes of load; objectives: {objectives}"] if objectives else []
    look = [f"  look     {page}   (requests as they move)"] if page else []
    return "\n".join(
        [
            f"Millrace is up after {took_s:.1f} s.",
            "",
            f"  API      {url}/v1   ({'model' if len(models) == 1 else 'models'} {', '.join(models)})",
            f"  try      curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
            *look,
            f"  watch    {command('status', directory)}; the same way top, tap 'decision.>', trace, explain REQUEST",
            *advice,
            f"  NATS     {nats_url}",
            f"  logs     {folder}/logs",
            f"  traces   {folder}/traces",
            "",
        ]
    )


def joined_banner(bus: BusConfig, directory: Path, took_s: float) -> str:
    """Text for a machine that has joined another one's cluster."""
    return (
        f"This machine's engines serve in the cluster {bus.cluster} at {bus.servers[0]} after {took_s:.1f} s.\n"
        f"  watch    {command('status', directory)}\n  logs     {shown(directory)}/logs\n"
        "What runs here moves away before this ends.\n"
    )


def joining(nats: NatsSpec, directory: Path) -> str:
    """Text that says how other machines join; empty where NATS cannot be reached from there."""
    if nats.host == "127.0.0.1":
        return ""
    host = "THIS_MACHINE" if nats.host in ("0.0.0.0", "::") else nats.host
    plain = "WARNING: NATS speaks no TLS: passwords and prompts pass as they are (nats.tls).\n"
    further = f" --set nats.tls={nats.tls}\n" if nats.tls else f"\n{plain}"
    return f"  join     millrace join nats://{host}:{nats.port} --token @{shown(directory)}/run/{TOKEN}{further}"


def open_api_warning(host: str, *, keys: bool) -> str:
    """Warns of an API that other machines reach and that asks nobody for a key; empty where there is nothing to say."""
    if keys or host in ("localhost", "::1") or host.startswith("127."):
        return ""
    return (
        f"WARNING: the API listens on {host} and asks for no key: whoever reaches this machine can use it.\n"
        "`millrace keys add NAME` and --keys FILE ask for keys; --host 127.0.0.1 keeps it on this machine.\n"
    )
