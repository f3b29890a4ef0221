"""Hidden states with what became of their sequences: what a head is trained on, and the file they are kept in.

One file per engine, bounded: when it holds OUTPUTS_MAX sequences it becomes the older half (``.1``), and a new one
begins.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

#: States kept of one sequence, drawn uniformly from all that were offered (Vitter's algorithm R).
STATES_MAX = 16
#: Sequences in a file before it becomes the older half. At width 288 some 9 KB each.
OUTPUTS_MAX = 20_000
#: A longer frame is a damaged file, bytes.
FRAME_BYTES_MAX = 1 << 24

_FORMAT = b"millrace-states/1 "
_HEADER_BYTES_MAX = 4_096


class StatesHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a states file: the model whose states it holds.

    Attributes:
        fingerprint: Of its weights.
        hidden_size: Width of a state.
    """

    model: str
    fingerprint: str
    hidden_size: int


class SequenceStates(msgspec.Struct, frozen=True, array_like=True):
    """One sequence that ended.

    Attributes:
        prompt: Prompt token ids, so that samples can be parted by prompt and the tagger be asked.
        length: Output tokens in the end.
        ended: It ended by itself; False where a bound cut it.
        max_tokens: Its bound.
        submitted: Whole output as submitted, tokens; 0 for none.
        generated: Output tokens at each state.
        states: float16 little-endian, (len(generated), width).
    """

    prompt: list[int]
    length: int
    ended: bool
    max_tokens: int
    submitted: int
    generated: list[int]
    states: bytes

    def matrix(self) -> NDArray[np.float32]:
        """The states, (len(generated), width)."""
        return np.frombuffer(self.states, "<f2").reshape(len(self.generated), -1).astype(np.float32)


class StateReservoir:
    """States of one sequence that still runs: a uniform sample of those offered, bounded."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kept: list[tuple[int, bytes]] = []
        self._offered = 0

    def offer(self, generated: int, state: bytes) -> None:
        """Takes a state (float16, little-endian), or not."""
        self._offered += 1
        if len(self._kept) < STATES_MAX:
            self._kept.append((generated, state))
        elif (place := self._rng.randrange(self._offered)) < STATES_MAX:
            self._kept[place] = (generated, state)

    def taken(self) -> tuple[list[int], bytes]:
        """Return the kept samples sorted by length: the lengths, and the states joined."""
        kept = sorted(self._kept)
        return [generated for generated, _ in kept], b"".join(state for _, state in kept)


class StatesUnreadable(ValueError):
    """A file of states that cannot be learnt from; the text names file and reason."""


class StateWriter:
    """Appends sequences to a file. Each call writes at once: recording is for training runs."""

    def __init__(self, path: Path, header: StatesHeader) -> None:
        self._path = path
        self._header = _FORMAT + msgspec.json.encode(header) + b"\n"
        self._encode = msgspec.msgpack.Encoder().encode
        self._written = 0
        self._begin()

    def _begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._path.write_bytes(self._header)
        self._written = 0

    def append(self, sequence: SequenceStates) -> None:
        """Writes one at the end.

        Raises:
            OSError: it cannot be written.
        """
        if self._written >= OUTPUTS_MAX:
            self._begin()
        frame = self._encode(sequence)
        with self._path.open("ab") as file:
            file.write(len(frame).to_bytes(4, "big") + frame)
        self._written += 1


def read_header(path: Path) -> StatesHeader:
    """Read the header of a states file.

    Raises:
        StatesUnreadable: it is none. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(_HEADER_BYTES_MAX)
    try:
        return msgspec.json.decode(line.removeprefix(_FORMAT), type=StatesHeader)
    except msgspec.DecodeError:
        raise StatesUnreadable(f"{path}: holds no states of this version") from None


def read_states(paths: Iterable[Path]) -> Iterator[SequenceStates]:
    """Reads files; one that ends inside a frame (the process was killed) ends before it.

    Raises:
        StatesUnreadable: it is none, is damaged, or holds states of another width. OSError: it cannot be read.
    """
    decode = msgspec.msgpack.Decoder(SequenceStates).decode
    for path in paths:
        width = read_header(path).hidden_size
        with path.open("rb") as file:
            file.readline(_HEADER_BYTES_MAX)
            while len(prefix := file.read(4)) == 4:
                size = int.from_bytes(prefix, "big")
                if size > FRAME_BYTES_MAX:
                    raise StatesUnreadable(f"{path}: damaged, a frame of {size} bytes")
                frame = file.read(size)
                if len(frame) < size:
                    break
                try:
                    found = decode(frame)
                except msgspec.DecodeError as error:
                    raise StatesUnreadable(f"{path}: {error}") from None
                if len(found.states) != 2 * width * len(found.generated):
                    raise StatesUnreadable(f"{path}: states of another width than {width}")
                yield found
