"""Runs the copiers' contract tests on soft-RoCE, in a QEMU guest with Debian's own kernel.

    ./task test:rdma [WORDS FOR PYTEST]

This machine's kernel may have no soft-RoCE, and needs none: the guest boots Debian's, mounts this machine's file system
read-only and runs pytest from it. The processor is emulated, some thirty times as slow: minutes. KVM is not tried: it
hangs where this machine is a guest itself.

Needs Debian (or a relative), root for what apt must install, and the built native module. Packages are kept in
``.millrace/rdma``. Exit status: pytest's, or 2 where the guest could not be made.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from setup.rdma_guest.archive import initramfs, load_order

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = ROOT / ".millrace" / "rdma"
OUT = CACHE / "out"

#: Program -> Debian package. ``rdma`` makes the device, busybox is all that the guest has of its own.
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "rdma": "iproute2"}
LIBRARIES = {"/usr/include/infiniband/verbs.h": "libibverbs-dev", "/etc/libibverbs.d/rxe.driver": "ibverbs-providers"}

MODULES = ["virtio_pci", "virtio_net", "9pnet_virtio", "9p", "crc32_generic", "crc32_pclmul", "ib_uverbs", "rdma_rxe"]
MEMORY = "2G"
#: An emulated processor takes three to eight minutes for the suite, by what else this machine does.
GUEST_SECONDS_MAX = 1500
APT_SECONDS_MAX = 900

TESTS = ["tests/contract/copier", "-k", "verbs"]
#: Plugins that the configuration names; loading all the installed ones takes the emulated processor a minute.
PYTEST = "-m pytest -v -p no:cacheprovider -p pytest_asyncio.plugin -p pytest_timeout --timeout 300"


class GuestImpossible(Exception):
    """Missing part of the guest; the message says what is missing, and how to get it."""


def main(words: list[str]) -> int:
    """Runs; returns the exit status."""
    CACHE.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        _install_what_is_missing()
        kernel, modules = _kernel()
        image = CACHE / "initramfs"
        image.write_bytes(_image(modules, words or TESTS))
        status = _boot(kernel, image)
    except (GuestImpossible, subprocess.SubprocessError, OSError) as failure:
        print(f"test:rdma: not run: {failure}", file=sys.stderr)
        return 2
    verdict = "passed" if status == 0 else f"FAILED (pytest ended with status {status})"
    print(f"test:rdma: {verdict}, {time.monotonic() - began:.0f} s from start to power-off")
    return status


def _install_what_is_missing() -> None:
    packages = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    packages += [package for file, package in LIBRARIES.items() if not Path(file).exists()]
    if packages:
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise GuestImpossible(f"missing: {', '.join(packages)} (apt-get install them)")
        print(f"test:rdma: apt-get install {' '.join(packages)}", flush=True)
        _apt("install", "--yes", "--no-install-recommends", *packages, folder=CACHE)


def _kernel() -> tuple[Path, dict[str, bytes]]:
    """Debian's kernel, from its package in the cache, and its modules by name."""
    package = next(iter(sorted(CACHE.glob("linux-image-*.deb"))), None) or _download_kernel()
    tree = CACHE / "kernel"
    if not (tree / "complete").exists():
        shutil.rmtree(tree, ignore_errors=True)
        subprocess.run(["dpkg-deb", "-x", str(package), str(tree)], check=True, timeout=APT_SECONDS_MAX)
        (tree / "complete").write_text(package.name)
    image = next(iter((tree / "boot").glob("vmlinuz-*")), None)
    if image is None:
        raise GuestImpossible(f"{package.name} holds no kernel")
    files = {path.stem.replace("-", "_"): path for path in tree.rglob("*.ko")}
    needed = load_order(MODULES, {name: path.read_bytes() for name, path in files.items() if _may_be_needed(path)})
    return image, {name: files[name].read_bytes() for name in needed}


def _may_be_needed(path: Path) -> bool:
    """Reading all of the kernel's modules takes seconds."""
    return any(part in path.parts for part in ("infiniband", "virtio", "9p", "net", "core", "lib", "fs", "crypto"))


def _download_kernel() -> Path:
    listing = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False, timeout=60
    )
    named = re.search(r"Depends: (linux-image-\S+)", listing.stdout)
    if named is None:
        raise GuestImpossible("apt knows no linux-image-amd64 (apt-get update, on Debian, for x86-64)")
    print(f"test:rdma: apt-get download {named.group(1)} (70 MB)", flush=True)
    _apt("download", named.group(1), folder=CACHE)
    return next(iter(sorted(CACHE.glob("linux-image-*.deb"))))


def _apt(verb: str, *words: str, folder: Path) -> None:
    (folder / "partial").mkdir(exist_ok=True)
    command = ["apt-get", "-q", "-o", f"Dir::Cache::archives={folder}", verb, *words]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=APT_SECONDS_MAX
    )
    if done.returncode:
        raise GuestImpossible(f"apt-get {verb} failed: {done.stderr.strip().splitlines()[-1:]}")


def _image(modules: dict[str, bytes], words: list[str]) -> bytes:
    busybox = Path(str(shutil.which("busybox"))).read_bytes()
    order = "\n".join(f"{name}.ko" for name in modules)
    files = {
        "init": ((HERE / "guest.sh").read_bytes(), 0o755),
        "bin/busybox": (busybox, 0o755),
        "command": (_command(words).encode(), 0o755),
        "modules/order": (order.encode(), 0o644),
        **{f"modules/{name}.ko": (content, 0o644) for name, content in modules.items()},
        **{f"{folder}/.keep": (b"", 0o644) for folder in ("proc", "sys", "dev")},
    }
    return initramfs(files)


def _command(words: list[str]) -> str:
    """Return the command that the guest runs, in this machine's file system."""
    settings = "HOME=/tmp PATH=/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"
    # Else NIXL would take the shortest way between two processes of one host.
    settings += " UCX_TLS=rc_verbs,self UCX_NET_DEVICES=rxe0:1"
    # sys.prefix, not the executable that it links to: the environment's packages hang on it.
    python = shlex.quote(f"{sys.prefix}/bin/python")
    return f"cd {shlex.quote(str(ROOT))} && {settings} exec {python} {PYTEST} {shlex.join(words)}\n"


def _boot(kernel: Path, image: Path) -> int:
    """Runs the guest to its end; returns the status that it left."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    command = [
        *(
            "qemu-system-x86_64",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            MEMORY,
            "-nographic",
            "-no-reboot",
        ),
        *("-kernel", str(kernel), "-initrd", str(image), "-append", "console=ttyS0 quiet panic=-1"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={OUT},mount_tag=out,security_model=none"),
        *("-nic", "user,restrict=on,model=virtio-net-pci"),
    ]
    print("test:rdma: the guest boots, emulated: minutes", flush=True)
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=GUEST_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as hang:
        raise GuestImpossible(f"the guest did not end within {GUEST_SECONDS_MAX} s") from hang
    status = OUT / "status"
    if not status.exists():
        raise GuestImpossible("the guest ended without a status: see its messages above")
    return int(status.read_text())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
