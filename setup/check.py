"""Runs every check, all of them even when one fails, and ends with one line that says what happened.

    .venv/bin/python setup/check.py [step ...]

Steps: format, format-native, lint, types, imports, schemas, scripts, scripts-lint. Each prints one line; the output of
a step is shown only where it failed. The last two look at the page's JavaScript and are skipped until
`./task check:page` has installed their programs.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
BIN = Path(PYTHON).parent

#: The linter has no `-m`, and its script stops working when the tree is moved.
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"

#: C++ sources; clang-format has no option for a folder.
NATIVE_SOURCES = sorted(path for kind in ("cpp", "hpp") for path in (ROOT / "native").rglob(f"*.{kind}"))

#: Programs from npm: `./task check:page` puts them there.
NODE = ROOT / ".venv" / "node" / "node_modules" / ".bin"

#: Step -> command and what to do about a failure.
STEPS: dict[str, tuple[list[str | Path], str]] = {
    "format": ([BIN / "ruff", "format", "--check", "--output-format", "concise", "."], "./task fmt"),
    "format-native": ([BIN / "clang-format", "--dry-run", "-Werror", *NATIVE_SOURCES], "./task fmt"),
    "lint": (
        [BIN / "ruff", "check", "--output-format", "concise", "."],
        "./task fmt repairs some; the rules are in pyproject.toml",
    ),
    "types": ([PYTHON, "-m", "mypy"], "the settings are in pyproject.toml"),
    "imports": ([PYTHON, "-c", LINT_IMPORTS, "--no-logo"], "the directions are in pyproject.toml, [tool.importlinter]"),
    "schemas": ([PYTHON, "-m", "setup.schemas", "--check"], "./task schemas, then read the difference"),
    "scripts": ([NODE / "tsc", "-p", "services/page/jsconfig.json"], "types are JSDoc comments"),
    "scripts-lint": ([NODE / "oxlint", "--deny-warnings", "services/page/static"], "its lines name the rules"),
}

#: The slowest step, mypy without a cache, takes under a minute on two cores.
STEP_SECONDS_MAX = 600


def main(asked: list[str]) -> int:
    """Runs the steps asked for, or all; returns 1 if one failed."""
    unknown = [name for name in asked if name not in STEPS]
    if unknown:
        print(f"check: no step '{unknown[0]}'; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    failed = [name for name in asked or STEPS if not _passes(name)]
    if failed:
        print(f"check: FAILED: {', '.join(failed)}")
        return 1
    print(f"check: passed ({', '.join(asked or STEPS)})")
    return 0


def _passes(name: str) -> bool:
    command, remedy = STEPS[name]
    if not Path(command[0]).exists():
        print(
            f"check: {name:8} skipped (no {Path(command[0]).name}: ./task check:page installs it, with Node)",
            flush=True,
        )
        return True
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_SECONDS_MAX,
        check=False,
    )
    passed = done.returncode == 0
    print(f"check: {name:8} {'ok' if passed else 'FAILED'} ({time.monotonic() - began:.1f} s)", flush=True)
    if not passed:
        print(done.stdout.rstrip())
        print(f"check: {name}: to repair it: {remedy}", flush=True)
    return passed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
