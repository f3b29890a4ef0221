"""Compiles the simulator's hot modules with mypyc: ``python setup/compile_simulator.py``, a minute and a half.

They go to build/simulator/<fingerprint of their sources>, where ``millrace sim``, ``millrace capacity`` and the figure
``sim_speed`` find them (libs/millrace/sim/compiled.py). Needs mypy's mypyc, a C compiler and Python's headers; without
all this the simulator runs in plain Python, with the same results, at about two thirds of the speed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from millrace.sim.compiled import BUILDS, MODULES, PACKAGE, SERVICES, compiled_files, fingerprint


def main() -> int:
    """Compiles, unless it is done; removes what was compiled of other sources."""
    target = BUILDS / fingerprint()
    if compiled_files(target).keys() >= set(MODULES):
        print("the simulator is compiled already")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sources"
        for package in (PACKAGE, SERVICES):
            shutil.copytree(package, copy / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        done = _compile(copy)
        shutil.rmtree(copy / "build", ignore_errors=True)  # has everything a second time
        if done.returncode:
            print(f"compile_simulator: mypyc failed; Python runs instead.\n{_errors(done.stdout)}", file=sys.stderr)
            return 1
        shutil.rmtree(BUILDS, ignore_errors=True)
        for name, path in compiled_files(copy).items():
            kept = target / path.relative_to(copy)
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, kept)
            print(f"compiled {name}")
    return 0


def _compile(sources: Path) -> subprocess.CompletedProcess[str]:
    """Runs mypyc in a copy of the sources, where it leaves the modules beside them."""
    files = [f"{name.replace('.', '/')}.py" for name in MODULES]
    options = ["--explicit-package-bases", "--ignore-missing-imports", "--follow-imports=silent"]
    return subprocess.run(
        [sys.executable, "-m", "mypyc", *options, *files],
        cwd=sources,
        env={**os.environ, "MYPYPATH": str(sources)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def _errors(output: str) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower() and not line.startswith("gcc")]
    return "\n".join(lines[:20] or output.splitlines()[-20:])


if __name__ == "__main__":
    raise SystemExit(main())
