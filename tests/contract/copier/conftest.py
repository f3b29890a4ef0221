"""Every implementation of the Copier port that can be tried here, its peers in processes of their own."""

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from millrace.contracts.kv import CopierKind, KvRank

from tests.contract.copier import sides
from tests.contract.copier.sides import BLOCKS, Side

ROOT = Path(__file__).resolve().parents[3]


class Peer:
    """Another process with some regions; region ``i`` holds the pattern of seed ``i + 1``."""

    def __init__(self, kind: CopierKind, folder: Path, *, name: str, count: int) -> None:
        command = [sys.executable, "-m", "tests.contract.copier.peer", kind, str(folder), name, str(count)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        words = self._process.stdout.readline().split()
        assert len(words) == count, "the peer has ended"
        self.ranks = [msgspec.json.decode(base64.b64decode(word), type=KvRank) for word in words]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def leave(self) -> int:
        """Lets it end by itself; returns its status."""
        self._process.communicate(timeout=sides.PATIENCE_S)
        return self._process.returncode

    def kill(self) -> None:
        """As kill -9 does."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module", params=list(sides.MAKERS))
def kind(request: pytest.FixtureRequest) -> CopierKind:
    """Each kind of copier."""
    kind: CopierKind = request.param
    if kind in sides.WHY_NOT and (reason := sides.WHY_NOT[kind]()):
        pytest.skip(reason)
    return kind


@pytest.fixture(scope="module")
def peer(kind: CopierKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """One other process for all tests that leave it alive."""
    peer = Peer(kind, tmp_path_factory.mktemp("peer"), name="peer", count=BLOCKS // 4)
    yield peer
    peer.kill()


@pytest.fixture
def mortals(kind: CopierKind, tmp_path: Path) -> Iterator[Callable[[], Peer]]:
    """Starts further processes at the same place, to be killed."""
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer(kind, tmp_path, name="mortal", count=1))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def own(kind: CopierKind, tmp_path: Path) -> Iterator[Side]:
    """This process's side: memory of zeros."""
    side = sides.make(kind, tmp_path, "own")
    yield side
    side.close()
