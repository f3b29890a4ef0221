"""The guest's first file system, and the order in which its kernel modules load."""

import shutil
import subprocess
from pathlib import Path

import pytest

from setup.rdma_guest.archive import initramfs, load_order


def module(*needs: str, soft: str = "") -> bytes:
    """The information section of a kernel module, among other bytes."""
    lines = [b"license=GPL", b"depends=" + ",".join(needs).encode()]
    if soft:
        lines.append(b"softdep=pre: " + soft.encode())
    return b"\x7fELF...\0" + b"\0".join(lines) + b"\0name=x\0"


def test_what_a_module_needs_comes_before_it_and_once() -> None:
    modules = {
        "rdma_rxe": module("ib_uverbs", "ib_core", "udp_tunnel", soft="crc32"),
        "ib_uverbs": module("ib_core"),
        "ib_core": module(""),
        "udp_tunnel": module(""),
        "crc32": module(""),
    }
    order = load_order(["rdma_rxe", "ib_core"], modules)
    assert sorted(order) == sorted(modules)
    for name, needed in [("rdma_rxe", "udp_tunnel"), ("rdma_rxe", "crc32"), ("ib_uverbs", "ib_core")]:
        assert order.index(needed) < order.index(name)


def test_a_name_that_is_built_into_the_kernel_is_left_out() -> None:
    assert load_order(["9p", "virtio"], {"9p": module("netfs", "9pnet"), "9pnet": module("")}) == ["9pnet", "9p"]


def test_dashes_in_names_are_underscores_in_files() -> None:
    assert load_order(["a"], {"a": module("crc32-generic"), "crc32_generic": module("")}) == ["crc32_generic", "a"]


@pytest.mark.skipif(shutil.which("cpio") is None, reason="no cpio here to read the archive with")
def test_cpio_reads_the_archive_back(tmp_path: Path) -> None:
    files = {"init": (b"#!/bin/sh\n", 0o755), "modules/a.ko": (b"\x00\x01" * 333, 0o644), "proc/.keep": (b"", 0o644)}
    words = ["cpio", "--extract", "--make-directories", "--quiet"]
    subprocess.run(words, input=initramfs(files), cwd=tmp_path, check=True, timeout=30)
    for path, (content, mode) in files.items():
        assert (tmp_path / path).read_bytes() == content
        assert (tmp_path / path).stat().st_mode & 0o777 == mode
