"""Writes the wire contract into schemas/: JSON Schema per message, and asyncapi.json.

    .venv/bin/python -m setup.schemas [--check]

With --check nothing is written; files that differ from the code are named, and the exit code is 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from setup.schema_documents import documents

SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"


def main(*, check: bool) -> int:
    """Writes or compares."""
    wanted = documents()
    differences = compare(SCHEMAS, wanted)
    print(*differences, f"{len(differences)} of {len(wanted)} schemas differ from the code", sep="\n")
    if check:
        return 1 if differences else 0
    write(SCHEMAS, wanted)
    return 0


def compare(directory: Path, wanted: dict[str, str]) -> list[str]:
    """One line per difference: ``missing``, ``differs`` or ``stale`` (no longer in the code) and the file."""
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*.json")}
    lines = [f"missing  {directory / name}" for name in wanted if name not in found]
    lines += [
        f"differs  {directory / name}"
        for name, text in wanted.items()
        if name in found and (directory / name).read_text("utf-8") != text
    ]
    return lines + [f"stale    {directory / name}" for name in sorted(found - wanted.keys())]


def write(directory: Path, wanted: dict[str, str]) -> None:
    """Writes every file and removes stale ones."""
    for path in list(directory.rglob("*.json")):
        if path.relative_to(directory).as_posix() not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
