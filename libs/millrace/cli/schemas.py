"""Writes the wire contract into a folder: JSON Schema per message, and asyncapi.json.

With --check nothing is written; files that differ from the code are named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--check", action="store_true", help="only print which files differ")
    parser.add_argument(
        "directory", nargs="?", type=Path, default=Path("schemas"), metavar="DIR", help="default: schemas"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exports or compares."""
    from millrace.cli.schema_documents import documents

    wanted = documents()
    differences = compare(arguments.directory, wanted)
    if arguments.check:
        for line in differences:
            print(line)
        print(
            f"{len(differences)} of {len(wanted)} files differ; `millrace schemas` writes them"
            if differences
            else f"schemas agree with the code ({len(wanted)} files)"
        )
        return 1 if differences else 0
    write(arguments.directory, wanted)
    print(f"wrote {len(wanted)} files into {arguments.directory} ({len(differences)} changed)")
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
