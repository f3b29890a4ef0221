"""Memory of a process's control groups (cgroups 2 and 1), as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

from millrace.files import file_text

#: Where memory's control groups are, and a group's files: of its limit, its use, its kills. Without limit they say
#: ``max`` or some 2^63.
MEMORY_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "memory.events"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
}


def group_memory(groups: str) -> tuple[int | None, int, int]:
    """Memory of a process's groups: the least limit, of the outer ones too, bytes, None where there is none; use of the
    group that has it, without cached files, which give way; processes of its own that the kernel has killed for it.

    Args:
        groups: Content of the process's ``/proc/PID/cgroup``.
    """
    limits, kills = list[tuple[int, int]](), 0
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if controllers not in MEMORY_GROUPS:
            continue
        root, limit, use, events = MEMORY_GROUPS[controllers]
        own = Path(f"{root}{path}")
        for group in (group for group in (own, *own.parents) if group.is_relative_to(root)):
            cached = max(_count(group / "memory.stat", name) for name in ("inactive_file", "total_inactive_file"))
            if (text := file_text(group / limit)).isdigit():
                limits.append((int(text), max(0, int(file_text(group / use) or 0) - cached)))
        kills += _count(own / events, "oom_kill")
    return *min(limits, default=(None, 0)), kills


def _count(file: Path, name: str) -> int:
    lines = (line.split() for line in file_text(file).splitlines())
    return next((int(line[1]) for line in lines if line[:1] == [name]), 0)
