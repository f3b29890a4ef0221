"""An initramfs in the format that Linux unpacks at boot (cpio, "newc"), and kernel modules in the order to load."""

from __future__ import annotations

import re
import stat
from pathlib import Path


def initramfs(files: dict[str, tuple[bytes, int]]) -> bytes:
    """An archive of files: path without a leading slash -> (content, permissions). Folders are made as needed."""
    folders = sorted({str(parent) for path in files for parent in Path(path).parents} - {"."})
    parts = [_entry(path, b"", stat.S_IFDIR | 0o755) for path in folders]
    parts += [_entry(path, content, stat.S_IFREG | mode) for path, (content, mode) in files.items()]
    parts.append(_entry("TRAILER!!!", b"", 0))
    return b"".join(parts)


def load_order(wanted: list[str], modules: dict[str, bytes]) -> list[str]:
    """The wanted modules and all that they need, needed ones first; names without ``.ko``.

    Names that are in no file are built into the kernel, as a rule, and left out.
    """
    order: list[str] = []

    def add(name: str) -> None:
        if name in modules and name not in order:
            for needed in _needs(modules[name]):
                add(needed)
            order.append(name)

    for name in wanted:
        add(name)
    return order


def _needs(module: bytes) -> list[str]:
    """Return the modules that its own information section names, with soft dependencies that must come before it."""
    hard = re.search(rb"\0depends=([^\0]*)\0", module)
    soft = re.search(rb"\0softdep=pre: ([^\0]*)\0", module)
    names = (hard.group(1).decode().split(",") if hard else []) + (soft.group(1).decode().split() if soft else [])
    return [name.replace("-", "_") for name in names if name]


def _entry(path: str, content: bytes, mode: int) -> bytes:
    name = path.encode() + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device numbers (4), length of the name, check
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
