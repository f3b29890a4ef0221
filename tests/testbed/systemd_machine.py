"""Runs a real systemd with a root, control groups and process namespace of its own, on this machine's network.

    unshare --mount --uts --pid --fork --kill-child python -m tests.testbed.systemd_machine GROUP FOLDER VARIABLES

It has this machine's folders, but /dev, /run, /tmp and /var of its own, and of /etc a copy without units.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.testbed.pods import make_root, mount

PROGRAM = Path("/lib/systemd/systemd")

NAMESPACES = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]

#: Ends what it starts with the thread that starts it.
WITH_US = ["setpriv", "--pdeathsig", "KILL"]

#: Folders of its own.
APART = ("dev", "etc", "lost+found", "mnt", "proc", "run", "sys", "tmp", "var")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
TARGETS = ("sysinit", "basic", "network-online", "shutdown", "multi-user")

CLONE_NEWCGROUP = 0x02000000

#: Longest wait for its start and its end, seconds.
LIMIT_S = 60.0


class SystemdMachine:
    """The machine, from outside.

    Args:
        folder: Is at its place inside too, unlike all else in /tmp.
        environment: Of every service.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._group = Path(*groups()[:1], f"millrace{os.getpid()}")
        self._words: list[str | Path] = [
            self._group,
            folder,
            *(f"{name}={value}" for name, value in environment.items()),
        ]

    def __enter__(self) -> SystemdMachine:
        self._group.mkdir()
        self._process = subprocess.Popen([*WITH_US, *NAMESPACES, sys.executable, "-m", __name__, *self._words])
        deadline = time.monotonic() + LIMIT_S
        while self.run("systemctl", "is-system-running", "--wait", check=False) != "running\n":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + LIMIT_S
        while "populated 1" in (self._group / "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        for folder in (*sorted(self._group.rglob("*/"), reverse=True), self._group):
            folder.rmdir()

    def run(self, *words: str | Path, folder: Path = Path("/"), check: bool = True) -> str:
        """Runs a program inside; returns what it says."""
        pids = [each.pid for each in psutil.Process(self._process.pid).children()] or [self._process.pid]
        enter: list[str | Path] = ["nsenter", "-a", "-r", "-t", str(pids[0]), "env", "-C", folder]
        done = subprocess.run([*enter, *words], capture_output=True, text=True, timeout=200, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)


def groups() -> list[str]:
    """Folders of this machine's control groups of version 2."""
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup2 " in line]


def main(group: Path, folder: Path, environment: list[str]) -> None:
    """Becomes systemd, which becomes the first process."""
    (group / "cgroup.procs").write_text("0")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWCGROUP):
        raise OSError(ctypes.get_errno(), "no namespace of control groups")
    root = make_root(APART)
    for name in ("dev/shm", "mnt", "proc", "run", "sys", "tmp", "var/tmp", str(folder).lstrip("/")):
        (root / name).mkdir(parents=True)
    for name in DEVICES:
        (root / "dev" / name).touch()
        mount("--bind", f"/dev/{name}", root / "dev" / name)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    mount("--bind", folder, root / str(folder).lstrip("/"))
    mount("-t", "proc", "proc", root / "proc")
    mount("--bind", "-o", "ro", root / "proc/sys", root / "proc/sys")
    mount("-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    mount("-t", "cgroup2", "cgroup2", root / "sys/fs/cgroup")
    shutil.copytree("/etc", root / "etc", symlinks=True, ignore=lambda place, _: ["systemd"] if place == "/etc" else [])
    units = root / "etc/systemd/system"
    units.mkdir(parents=True)
    for name in TARGETS:
        (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    with (units / "multi-user.target").open("a") as file:
        file.write("Requires=basic.target sysinit.target systemd-journald.service\n")
    for name in ("systemd-journald.service", "systemd-journald.socket"):
        shutil.copy(PROGRAM.parent / "system" / name, units)
    words = " ".join(f'"{word}"' for word in environment)
    (units.parent / "system.conf").write_text(f"[Manager]\nDefaultEnvironment={words}\n")
    (units.parent / "journald.conf").write_text("[Journal]\nReadKMsg=no\n")
    os.chroot(root)
    os.chdir("/")
    inherited = {"PATH": os.environ["PATH"], "container": "other", "SYSTEMD_UNIT_PATH": "/etc/systemd/system"}
    os.execve(PROGRAM, [str(PROGRAM), "--unit=multi-user.target"], inherited)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
