"""A real nats-server of one test run: its own port, its own store, ended by its own pid."""

import re
import subprocess
import sys
import time
from pathlib import Path

#: How long the server may take to listen, seconds.
START_S_MAX = 10.0


class NatsProcess:
    """nats-server from the virtual environment with JetStream. Chooses a free port at its first start and keeps it.

    ``configuration`` is text of a configuration file; port and, unless it has one, store are given on the command line.
    """

    def __init__(self, folder: Path, configuration: str = "") -> None:
        self._folder = folder
        self._configuration = folder / "nats.conf"
        self._configuration.write_text(f"debug: false\n{configuration}")  # an empty file is complained about
        self._store = [] if "store_dir" in configuration else ["-js", "-sd", str(folder / "store")]
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts it and waits until it listens."""
        self._starts += 1
        log = self._folder / f"nats-{self._starts}.log"
        binary = Path(sys.executable).with_name("nats-server")
        command = [str(binary), "-c", str(self._configuration), "-a", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen([*command, *self._store, "-l", str(log)])
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            text = log.read_text() if log.exists() else ""
            if "Server is ready" in text:
                self._port = int(re.findall(r"client connections on 127\.0\.0\.1:(\d+)", text)[-1])
                return
            time.sleep(0.01)
        raise TimeoutError(f"nats-server did not listen within {START_S_MAX} s: {log}")

    def kill(self, *, keep_store: bool = True) -> None:
        """Ends it as ``kill -9`` does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=10)
        self._process = None
        if not keep_store:
            (self._folder / "store").rename(self._folder / f"store-lost-{self._starts}")

    def close(self) -> None:
        """Ends it if it runs."""
        if self._process is not None:
            self.kill()
