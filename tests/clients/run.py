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

from tests.clients.scripted_model import build
from tests.testbed.up_cluster import UpRig

HERE = Path(__file__).resolve().parent
ROOT, AGENTS = HERE.parents[1], HERE / "test_agent_programs.py"
LOCKS, ENVIRONMENTS = ROOT / "setup" / "locks", ROOT / ".millrace"
MODEL = "millrace-agent"
#: OpenAI's SDK for JavaScript and agents' programs, from npm, with the versions that were tried.
PROGRAMS = ("openai@7.59.0", "@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.197")
NPM = ENVIRONMENTS / "npm" / "node_modules"

#: The file of the vocabulary o200k_base: the hash of where tiktoken would load it from.
O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"


def main(words: list[str]) -> int:
    """Return pytest's exit status."""
    if shutil.which("npm"):
        install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", NPM.parent]
        subprocess.run([*install, *PROGRAMS], check=True)
    python, guidellm = environment("clients"), environment("guidellm", on_top=True)
    if failed := harmony(python):
        return failed
    with tempfile.TemporaryDirectory(prefix="millrace-clients-") as folder:
        scripted = build(Path(folder, "scripted"))
        if failed := tested(python, guidellm, scripted, [AGENTS]):
            return failed
    return tested(python, guidellm, ROOT / "models" / MODEL, [HERE, "--ignore", AGENTS, *words])


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
            Path(packages, "on_top.pth").write_text(
                f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            )
        stamp.write_text(digest)
    return python


def tested(python: Path, guidellm: Path, model: Path, words: list[str | Path]) -> int:
    """Run the tests in that environment, without this repository on its path, against a cluster with the model."""
    command = [python, "-m", "pytest", "-c", os.devnull, "--rootdir", HERE, "--confcutdir", HERE, "-ra", *words]
    with tempfile.TemporaryDirectory(prefix="millrace-clients-") as folder:
        rig = UpRig.of_words(Path(folder), ("--model", str(model), "--instances", "1"), model.name)
        try:
            rig.start()
            told = {"MILLRACE_URL": rig.url, "MILLRACE_MODEL": model.name, "MILLRACE_NPM": str(NPM)}
            told |= {"MILLRACE_PYTHON": sys.executable, "MILLRACE_GUIDELLM_PYTHON": str(guidellm)}
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            variables |= told | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            return subprocess.run(command, env=variables, check=False).returncode
        finally:
            rig.stop()


if __name__ == "__main__":
    # One that is stopped, as by `timeout`, takes its cluster along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
