"""The folder of a cluster's files, found from the working directory, and the commands that reach the cluster there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

FOLDER = ".millrace"


def find_folder(start: Path, environment: Mapping[str, str]) -> Path | None:
    """The ``.millrace`` folder: ``MILLRACE_DIR`` where it is set, else the first one from ``start`` upwards."""
    if given := environment.get("MILLRACE_DIR"):
        return Path(given)
    candidates = (place / FOLDER for place in (start, *start.parents))
    return next((folder for folder in candidates if folder.is_dir()), None)


def command(verb: str, directory: Path) -> str:
    """The command line of a verb for the cluster in ``directory``, as typed in the working directory.

    Args:
        verb: With its further words. ``--dir`` is left out where the verb finds the cluster without it.
    """
    start, directory = Path.cwd(), directory.absolute()
    program = "./task" if (start / "task").is_file() else "millrace"
    if find_folder(start, {}) == directory:
        return f"{program} {verb}"
    return f"{program} {verb} --dir {shlex.quote(str(shown(directory)))}"


def shown(path: Path) -> Path:
    """A path for a person: relative where it lies below the working directory."""
    path, start = path.absolute(), Path.cwd()
    return path.relative_to(start) if path.is_relative_to(start) else path
