"""Runs tests/clients: client libraries in an environment of their own against a cluster of real vLLM.

    python -m tests.clients.run [pytest's arguments]

The environment is made anew when the lock of its versions changes.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from testbed.up_cluster import UpRig

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "locks" / "clients.txt"
MODEL = "millrace-agent"


def main(words: list[str]) -> int:
    """Return pytest's exit status."""
    python = environment(ROOT / ".millrace" / "clients")
    with tempfile.TemporaryDirectory(prefix="millrace-clients-") as folder:
        start = ("--model", str(ROOT / "models" / MODEL), "--instances", "1")
        rig = UpRig.of_words(Path(folder), start, MODEL)
        rig.start()
        try:
            return tested(python, rig.url, words)
        finally:
            rig.stop()


def environment(folder: Path) -> Path:
    """Return the interpreter of a virtual environment with the lock's versions; made anew when the lock changes."""
    python, stamp = folder / "bin" / "python", folder / "lock.sha256"
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", LOCK], check=True)
        stamp.write_text(digest)
    return python


def tested(python: Path, url: str, words: list[str]) -> int:
    """Run the tests in that environment, without this repository on its path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"MILLRACE_URL": url, "MILLRACE_MODEL": MODEL, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    here = Path(__file__).parent
    command = [python, "-m", "pytest", "-c", os.devnull, "--rootdir", here, "--confcutdir", here, "-ra", here, *words]
    return subprocess.run(command, env=variables, check=False).returncode


if __name__ == "__main__":
    # One that is stopped, as by `timeout`, takes its cluster along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
