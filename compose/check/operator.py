"""The command line as an operator uses it against a deployment: moving requests, listening in, drawing traces."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compose.check.calls import ROOT, Failed, call, wait
from compose.check.deployment import Deployment

#: A migration may fail by its deadlines where other processes take the processor away; its request then goes on.
TRIES = 5


class Operator:
    """Runs `millrace` with the deployment's own passwords.

    Args:
        deployment: A running one.
        nats_port: On this host.
    """

    def __init__(self, deployment: Deployment, nats_port: int) -> None:
        self._passwords = json.loads((deployment.folder / "passwords.json").read_text())
        self._nats = f"nats://127.0.0.1:{nats_port}"

    def run(self, verb: str, *words: str) -> str:
        """Run an operator's command and return what it prints.

        Raises:
            Failed: it ended with another status than 0.
        """
        return call(self._command("operator", verb, *words)).strip()

    def move(self, requests: Sequence[str]) -> list[str]:
        """Moves each to another instance, all at once; returns what is told of each move.

        Raises:
            Failed: one does not move.
        """
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self._move, requests))

    def refused(self, request: str, *, to: str) -> str:
        """Ask for a move that cannot be, and return what the operator is told.

        Raises:
            Failed: it is not refused.
        """
        told = call(self._command("operator", "migrate", request, "--to", to), check=False).strip()
        if "  refused: " not in told:
            raise Failed(f"{request} should not move to {to}: {told or 'nothing is told'}")
        return told

    def _move(self, request: str) -> str:
        failures: list[str] = []
        while len(failures) < TRIES:
            try:
                return self.run("migrate", request)
            except Failed as failure:
                failures.append(str(failure))
        raise Failed(f"{request} did not move: " + "; then ".join(dict.fromkeys(failures)))

    @contextlib.contextmanager
    def listening(self, file: Path) -> Iterator[None]:
        """`millrace tap` of everything, into a file."""
        with file.open("wb") as lines:
            command = self._command("observer", "tap", ">")
            tap = subprocess.Popen(command, cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT)
        try:
            wait("millrace tap to hear something", 60, lambda: file.stat().st_size or tap.poll() is not None)
            yield
        finally:
            tap.terminate()  # a check that runs in the background has SIGINT ignored, and so have its children
            tap.wait(timeout=30)

    def _command(self, role: str, verb: str, *words: str) -> list[str]:
        password = f"--password={self._passwords[role]}"
        connection = ["--nats", self._nats, "--cluster", "node", "--user", role, password]
        return [sys.executable, "-m", "millrace.cli", verb, *words, *connection]
