"""Runs the native code under sanitizers: the copier's C++ tests and fuzz target, then the modules Python loads.

.venv/bin/python setup/check_native.py [PART ...]

Parts: ``kvcopy`` is C++ alone, under AddressSanitizer with UndefinedBehaviorSanitizer and then under ThreadSanitizer
(some 20 s); ``copies``, ``segments`` and ``forecast`` build the modules that Python loads with the former into a folder
of their own and run their tests (a minute, and minutes). All of them by default.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
BUILD = NATIVE / "build" / "sanitized"
PACKAGE = BUILD / "package" / "millrace_native"

#: A build from nothing takes about a minute on two cores, the tests under sanitizers a few.
SECONDS_MAX = 1200

SANITIZERS = ("address,undefined", "thread")
#: Inputs that the planner is fuzzed with, and the seed; 100,000 take some seconds under ThreadSanitizer.
FUZZ = ("100000", "1")

TESTS = {
    "copies": [
        *(f"tests/unit/test_kvcopy_{name}.py" for name in ("plan", "checksum", "memory")),
        "tests/contract/copier/test_copier.py",
    ],
    "segments": ["tests/unit/test_kvcache_queue.py"],
    "forecast": ["tests/unit/test_forecast.py", "tests/unit/test_forecast_moving.py"],
}


def main(parts: list[str]) -> int:
    """Builds and runs; returns 0, or the status of what failed."""
    unknown = set(parts) - {"kvcopy", *TESTS}
    if unknown:
        print(f"check:native: no part {sorted(unknown)[0]!r}; there are: kvcopy, {', '.join(TESTS)}", file=sys.stderr)
        return 2
    status = 0
    if not parts or "kvcopy" in parts:
        status = _run_cpp_tests()
    tests = [path for part, paths in TESTS.items() if not parts or part in parts for path in paths]
    if tests and status == 0:
        _build_modules()
        status = _run_python_tests(tests)
    print(f"check:native: {'passed' if status == 0 else 'FAILED'}")
    return status


def _run_cpp_tests() -> int:
    for sanitizers in SANITIZERS:
        folder = NATIVE / "build" / f"kvcopy-{sanitizers.split(',')[0]}"
        source = str(NATIVE / "kvcopy" / "tests")
        _run(["cmake", "-S", source, "-B", str(folder), "-G", "Ninja", f"-DSANITIZERS={sanitizers}"])
        _run(["cmake", "--build", str(folder)])
        for command in ([str(folder / "kvcopy_tests")], [str(folder / "planner_fuzz"), *_fuzz_arguments(folder)]):
            print(f"check:native: {Path(command[0]).name} under {sanitizers}", flush=True)
            status = subprocess.run(command, timeout=SECONDS_MAX, check=False).returncode
            if status:
                return status
    return 0


def _fuzz_arguments(folder: Path) -> list[str]:
    """libFuzzer, where clang built it, has words of its own."""
    runs, seed = FUZZ
    cache = (folder / "CMakeCache.txt").read_text()
    return [f"-runs={runs}", f"-seed={seed}"] if "clang" in cache.lower() else [runs, seed]


def _build_modules() -> None:
    _run(
        [
            *("cmake", "-S", str(NATIVE), "-B", str(BUILD), "-G", "Ninja"),
            *("-DCMAKE_BUILD_TYPE=Debug", "-DMILLRACE_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"),
            f"-Dnanobind_DIR={_nanobind_cmake()}",
        ]
    )
    _run(["cmake", "--build", str(BUILD)])
    PACKAGE.mkdir(parents=True, exist_ok=True)
    (PACKAGE / "__init__.py").write_text("")
    for module in BUILD.glob(f"*{sysconfig.get_config_var('EXT_SUFFIX')}"):
        (PACKAGE / module.name).write_bytes(module.read_bytes())


def _run_python_tests(tests: list[str]) -> int:
    environment = {
        **os.environ,
        # The interpreter itself is not built with the sanitizer, so its library must come first. Python does not free
        # everything at its end.
        "LD_PRELOAD": f"{_library('libasan.so')} {_library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(PACKAGE.parent),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600", *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS_MAX, check=False).returncode


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
    raise SystemExit(main(sys.argv[1:]))
