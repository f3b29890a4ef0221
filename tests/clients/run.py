"""Runs tests/clients: client libraries and load generators against a cluster of real vLLM.

    python -m tests.clients.run [pytest's arguments]

The libraries have an environment of their own, and so has guidellm, which takes torch and transformers from the one
that runs this. An environment is made anew when the lock of its versions changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.testbed.up_cluster import UpRig

ROOT = Path(__file__).resolve().parents[2]
LOCKS, ENVIRONMENTS = ROOT / "setup" / "locks", ROOT / ".millrace"
MODEL = "millrace-agent"
#: Agents' programs from npm, with the versions that were tried.
PROGRAMS = ("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.197")

#: The file of the vocabulary o200k_base: the hash of where tiktoken would load it from.
O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"


def main(words: list[str]) -> int:
    """Return pytest's exit status."""
    if shutil.which("npm"):
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", ENVIRONMENTS / "npm"]
        subprocess.run([*install, *PROGRAMS], check=True)
        tried = subprocess.run(
            [sys.executable, "-m", "pytest", ROOT / "tests/live/test_agent_programs.py"], check=False
        )
        if tried.returncode:
            return tried.returncode
    python, guidellm = environment("clients"), environment("guidellm", on_top=True)
    if failed := harmony(python):
        return failed
    with tempfile.TemporaryDirectory(prefix="millrace-clients-") as folder:
        start = ("--model", str(ROOT / "models" / MODEL), "--instances", "1")
        rig = UpRig.of_words(Path(folder), start, MODEL)
        try:
            rig.start()
            return tested(python, {"MILLRACE_URL": rig.url, "MILLRACE_GUIDELLM_PYTHON": str(guidellm)}, words)
        finally:
            rig.stop()


def harmony(python: Path) -> int:
    """Return pytest's exit status of the tests of gpt-oss's format, with the vocabulary that litellm ships."""
    (vocabulary,) = python.parents[1].glob(f"lib/*/site-packages/litellm/*/tokenizers/{O200K}")
    with tempfile.TemporaryDirectory(prefix="millrace-harmony-") as folder:
        shutil.copy(vocabulary, Path(folder) / "o200k_base.tiktoken")
        command = [sys.executable, "-m", "pytest", ROOT / "tests/live/test_parser_process.py", "-k", "harmony"]
        told = os.environ | {"TIKTOKEN_ENCODINGS_BASE": folder}
        return subprocess.run(command, env=told, check=False).returncode


def environment(name: str, *, on_top: bool = False) -> Path:
    """Return the interpreter of a virtual environment with a lock's versions; made anew when the lock changes.

    Args:
        name: The lock's name, and the folder's.
        on_top: What the lock does not name is taken from the environment that runs this.
    """
    folder, lock = ENVIRONMENTS / name, LOCKS / f"{name}.txt"
    python, stamp = folder / "bin" / "python", folder / "lock.sha256"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", lock], check=True)
        if on_top:
            packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
            Path(packages, "on_top.pth").write_text(sysconfig.get_path("purelib") + "\n")
        stamp.write_text(digest)
    return python


def tested(python: Path, told: dict[str, str], words: list[str]) -> int:
    """Run the tests in that environment, without this repository on its path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"MILLRACE_MODEL": MODEL, "MILLRACE_PYTHON": sys.executable, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    here = Path(__file__).parent
    command = [python, "-m", "pytest", "-c", os.devnull, "--rootdir", here, "--confcutdir", here, "-ra", here, *words]
    return subprocess.run(command, env=variables | told, check=False).returncode


if __name__ == "__main__":
    # One that is stopped, as by `timeout`, takes its cluster along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
