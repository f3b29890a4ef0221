"""Builds native/ with sanitizers into a folder of its own and runs the tests that compare it with the reference.

.venv/bin/python setup/check_native.py
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "native" / "build" / "sanitized"
PACKAGE = BUILD / "package" / "millrace_native"

#: A build from nothing takes about a minute on two cores, the tests under sanitizers a few.
SECONDS_MAX = 1200

TESTS = ["tests/unit/test_forecast_native.py", "tests/unit/test_forecast.py"]


def main() -> int:
    """Builds and runs; returns pytest's status."""
    _run(
        [
            *("cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=Debug", "-DMILLRACE_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"),
            f"-Dnanobind_DIR={_nanobind_cmake()}",
        ]
    )
    _run(["cmake", "--build", str(BUILD)])
    PACKAGE.mkdir(parents=True, exist_ok=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    (PACKAGE / "__init__.py").write_text("")
    (PACKAGE / f"enginemodel{suffix}").write_bytes((BUILD / f"enginemodel{suffix}").read_bytes())
    environment = {
        **os.environ,
        # The interpreter itself is not built with the sanitizer, so its library must come first. Python does not free
        # everything at its end.
        "LD_PRELOAD": f"{_library('libasan.so')} {_library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(PACKAGE.parent),
    }
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600", *TESTS]
    status = subprocess.run(tests, cwd=ROOT, env=environment, timeout=SECONDS_MAX, check=False).returncode
    print(f"check:native: {'passed' if status == 0 else 'FAILED'}")
    return status


def _nanobind_cmake() -> str:
    command = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _library(name: str) -> str:
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _run(command: list[str]) -> None:
    print("check:native:", " ".join(command[:3]), "...", flush=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=SECONDS_MAX, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(main())
