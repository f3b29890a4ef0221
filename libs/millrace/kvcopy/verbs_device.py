"""The compiled RDMA calls where they are built and a device is there: opening one, registering a region. The only place
that imports millrace_native.verbs.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from millrace.kvcopy.copier import CopierError
from millrace.kvcopy.verbs_gpu import export_dmabuf

if TYPE_CHECKING:
    from millrace_native.verbs import Device, QueuePair, Region

#: Changes with the compiled calls; a build of another interface is of older or newer sources.
INTERFACE = 1
_MAPPED_IPV4 = bytes(10) + b"\xff\xff"


class PairAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a queue pair, for the other side: see native/kvcopy/verbs/include/queue_pair.hpp."""

    number: int
    sequence: int
    lid: int
    gid: bytes
    mtu: int
    reads: int


def why_not() -> str:
    """Return the reason why RDMA verbs cannot be used here; empty where they can."""
    try:
        native = _native()
    except ImportError as missing:
        return f"RDMA verbs are not built here (libibverbs-dev was missing when native/ was built): {missing}"
    if native.INTERFACE != INTERFACE:
        return "millrace_native.verbs is of other sources; build native/ again"
    if not native.usable_devices():
        return "no RDMA device with an active port on this machine"
    return ""


@contextlib.contextmanager
def guarded(what: str) -> Iterator[None]:
    """Errors of the compiled calls become CopierError."""
    try:
        yield
    except _native().VerbsError as failure:
        raise CopierError(f"{what}: {failure}") from failure
    except (ValueError, TypeError) as failure:  # a peer's numbers that fit no address
        raise CopierError(f"{what}: {failure}") from failure


class OpenDevice:
    """An RDMA device with one registered region; queue pairs are made here and closed by whoever asked.

    Attributes:
        message_bytes_max: A READ is at most so long.
    """

    def __init__(self, *, name: str, gid_index: int, address: int, size: int, gpu: int) -> None:
        """Opens ``name`` (empty: the first that can be used) and registers the region. Raises CopierError."""
        if reason := why_not():
            raise CopierError(reason)
        native = _native()
        with guarded("the RDMA device cannot be used"):
            self._device: Device = native.Device(name or native.usable_devices()[0], gid_index)
        with guarded("the KV region cannot be registered for RDMA"):
            self._region: Region = self._register(address, size, gpu)
        self.message_bytes_max = self._device.message_bytes_max

    @property
    def remote_key(self) -> int:
        """Peers show it with each READ."""
        return int(self._region.remote_key)

    def host(self) -> str:
        """An address of this host that peers on the same network reach: the port's own where it has an IPv4 one."""
        gid = self._device.gid
        if gid.startswith(_MAPPED_IPV4):
            return str(ipaddress.IPv4Address(gid[12:]))
        return socket.gethostname()

    def pair(self, *, asks: bool, depth: int) -> QueuePair:
        """A queue pair that is not connected yet; the caller closes it."""
        with guarded("no queue pair"):
            made: QueuePair = _native().QueuePair(self._device, self._region, asks, depth)
            return made

    def close(self) -> None:
        """Takes the region out of peers' reach. Queue pairs must be closed before. Idempotent."""
        self._region.close()

    def _register(self, address: int, size: int, gpu: int) -> Any:
        """A GPU's memory is registered as a dma-buf where the driver exports one; else as any memory is, which works
        with nvidia-peermem. Neither has been run on a GPU.
        """
        native = _native()
        exported = export_dmabuf(address, size) if gpu >= 0 else None
        if exported is None:
            return native.Region(self._device, address, size)
        try:
            return native.Region(self._device, address, size, exported.fd, exported.offset)
        finally:
            os.close(exported.fd)  # the registration holds the memory by itself


def address_of(pair: QueuePair) -> PairAddress:
    """Return the address of a queue pair, to be sent to the other side."""
    with guarded("the queue pair has no address"):
        return PairAddress(*pair.address())


def join(pair: QueuePair, peer: PairAddress, *, timeout: int) -> None:
    """Connects it; the other side does the same with this one's address."""
    with guarded("the queue pair cannot be connected"):
        pair.connect(peer.number, peer.sequence, peer.lid, peer.gid, peer.mtu, peer.reads, timeout=timeout)


def _native() -> Any:
    return importlib.import_module("millrace_native.verbs")
