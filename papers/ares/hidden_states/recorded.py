"""Hidden states with what became of their sequences: what a head is trained on. One file per engine (``frames.py``)."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from millrace.lengths.frames import FileUnreadable, FrameWriter, read_frames, read_header
from numpy.typing import NDArray

#: States kept of one sequence, drawn uniformly from all that were offered (Vitter's algorithm R).
STATES_MAX = 16
#: Sequences in a file before it becomes the older half. At width 288 some 9 KB each.
OUTPUTS_MAX = 20_000

_FORMAT = b"millrace-states/1 "


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


def state_writer(path: Path, header: StatesHeader) -> FrameWriter:
    """Begins a file; one that is there becomes its older half."""
    return FrameWriter(path, _FORMAT + msgspec.json.encode(header) + b"\n", values_max=OUTPUTS_MAX)


def states_header(path: Path) -> StatesHeader:
    """Read the header of a states file.

    Raises:
        FileUnreadable: it is none. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        line = read_header(file)
    try:
        return msgspec.json.decode(line.removeprefix(_FORMAT), type=StatesHeader)
    except msgspec.DecodeError:
        raise FileUnreadable(f"{path}: holds no states of this version") from None


def read_states(paths: Iterable[Path]) -> Iterator[SequenceStates]:
    """Reads files.

    Raises:
        FileUnreadable: it is none, is damaged, or holds states of another width. OSError: it cannot be read.
    """
    decoder = msgspec.msgpack.Decoder(SequenceStates)
    for path in paths:
        width = states_header(path).hidden_size
        with path.open("rb") as file:
            read_header(file)
            for found in read_frames(file, decoder):
                if len(found.states) != 2 * width * len(found.generated):
                    raise FileUnreadable(f"{path}: states of another width than {width}")
                yield found
