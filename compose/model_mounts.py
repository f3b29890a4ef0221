"""Folders of models as containers see them: what to mount, and why a folder cannot be mounted."""

from __future__ import annotations

import stat
from pathlib import Path

from millrace.cluster.spec import ModelSpec


def mount_source(model: ModelSpec) -> Path:
    """Return the folder of this host that a model's containers mount.

    A snapshot in Hugging Face's cache holds links to files beside it: its repository's folder is mounted.
    """
    folder = Path(model.path)
    repository = folder.parent.parent
    return repository if folder.parent.name == "snapshots" and (repository / "blobs").is_dir() else folder


def not_in_containers(model: ModelSpec) -> str:
    """Return the first of a model's files that its containers would miss or may not read, and why; empty for none."""
    folder, mount = Path(model.path), mount_source(model)
    for path in filter(Path.exists, (mount, folder, *sorted(folder.rglob("*")))):
        if not path.resolve().is_relative_to(mount.resolve()):
            return f"{path}: a link out of {mount}, which containers do not see; cp -rL copies a folder with its links"
        needed = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
        if path.stat().st_mode & needed != needed:
            return f"{path}: the containers' user may not read it; chmod -R o+rX {mount}"
    return ""
