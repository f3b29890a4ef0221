"""The memfd that KV lies in: its size is sealed, readers cannot write, and it is handed out only as what it is."""

import mmap
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from millrace.kvcopy import handout
from millrace.kvcopy.copier_port import CopierError
from millrace.kvcopy.handout import RegionServer, RemoteRegion
from millrace.kvcopy.memory import SharedRegion, map_sealed

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    region = SharedRegion(SIZE)
    yield region
    region.close()


@pytest.fixture
def server(region: SharedRegion, tmp_path: Path) -> Iterator[RegionServer]:
    server = RegionServer(region, tmp_path / "kv.sock")
    yield server
    server.close()


def remote(server: RegionServer, *, size: int = SIZE) -> RemoteRegion:
    return RemoteRegion(str(server.path), incarnation=server.incarnation, size=size)


def test_a_region_is_zero_whole_pages_and_where_it_says(region: SharedRegion) -> None:
    assert SharedRegion(1).size == mmap.PAGESIZE
    assert len(region.view) == SIZE
    assert not region.view.any()
    region.view[5] = 9
    assert os.pread(region.fd, 1, 5) == b"\x09"
    assert region.view.ctypes.data == region.address


def test_a_region_never_changes_its_size(region: SharedRegion) -> None:
    for size in (0, SIZE - 1, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)


def test_a_view_outlives_the_region_that_it_is_of() -> None:
    region = SharedRegion(SIZE)
    view = region.view
    region.close()
    region.close()
    del region
    view[:] = 7
    assert view.sum() == 7 * SIZE


def test_a_closed_region_hands_nothing_out(region: SharedRegion, tmp_path: Path) -> None:
    region.close()
    with pytest.raises(CopierError, match="closed"):
        RegionServer(region, tmp_path / "kv.sock")


def test_a_reader_sees_what_the_owner_writes_and_cannot_write(region: SharedRegion, server: RegionServer) -> None:
    reader = remote(server)
    region.view[100] = 3
    assert reader.memory[100] == 3
    with pytest.raises(ValueError, match="read-only"):
        reader.memory[100] = 4
    reader.close()


def test_the_descriptor_that_is_handed_out_cannot_be_mapped_writable_or_reopened(server: RegionServer) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.path))
        _, descriptors, _, _ = socket.recv_fds(connection, 100, 1)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptors[0], SIZE)
    again = os.open(f"/proc/self/fd/{descriptors[0]}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)
    os.close(descriptors[0])


def test_memory_that_could_shrink_under_a_reader_is_refused(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for descriptor, why in ((unsealed, "not sealed"), (file, "memfd")):
        os.ftruncate(descriptor, SIZE)
        with pytest.raises(CopierError, match=why):
            map_sealed(descriptor, SIZE)
        os.close(descriptor)


def test_a_region_smaller_than_announced_is_refused(region: SharedRegion, server: RegionServer) -> None:
    with pytest.raises(CopierError, match="announced"):
        map_sealed(region.fd, SIZE + 1)
    with pytest.raises(CopierError, match="announced"):
        remote(server, size=SIZE + 1)


def test_only_its_owner_may_connect(server: RegionServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


def test_a_socket_that_a_killed_process_left_is_replaced(region: SharedRegion, tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = RegionServer(region, path)
    remote(server).close()
    server.close()
    assert not path.exists()


def test_a_path_in_use_is_left_alone(region: SharedRegion, server: RegionServer, tmp_path: Path) -> None:
    with pytest.raises(CopierError, match="another process listens"):
        RegionServer(region, server.path)
    remote(server).close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CopierError, match="cannot listen"):
        RegionServer(region, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


def test_a_path_too_long_for_the_kernel_is_refused(region: SharedRegion, tmp_path: Path) -> None:
    with pytest.raises(CopierError, match="107"):
        RegionServer(region, tmp_path / ("x" * 120))


def test_readers_are_limited_in_number_and_room_returns(region: SharedRegion, server: RegionServer) -> None:
    readers = [remote(server) for _ in range(handout.PEERS_MAX)]
    with pytest.raises(CopierError, match="room"):
        remote(server)
    for reader in readers:
        reader.close()
    for _ in range(1000):  # the server notices on its own thread
        try:
            remote(server).close()
            return
        except CopierError:
            continue
    raise AssertionError("the room never returned")


@pytest.mark.parametrize(
    "greeting",
    [
        pytest.param(b"", id="silence and an end"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("<8s16sQ", b"MRKVFD01", bytes(16), SIZE), id="ours without a descriptor"),
    ],
)
def test_somebody_else_at_the_socket_is_refused(tmp_path: Path, greeting: bytes) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "kv.sock"))
    listener.listen()

    def answer() -> None:
        connection, _ = listener.accept()
        connection.sendall(greeting)
        connection.close()

    thread = Thread(target=answer)
    thread.start()
    with pytest.raises(CopierError):
        RemoteRegion(str(tmp_path / "kv.sock"), incarnation=bytes(16), size=SIZE)
    thread.join()
    listener.close()


def test_a_descriptor_under_another_incarnation_is_refused_and_closed(server: RegionServer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(CopierError, match="another process"):
            RemoteRegion(str(server.path), incarnation=bytes(16), size=SIZE)
    # The server's ends of the last connections may still be open.
    assert len(os.listdir("/proc/self/fd")) <= before + 10
