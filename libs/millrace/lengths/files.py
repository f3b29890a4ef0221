"""Storage of outcomes and models: a folder with one sub-folder per served model. The only I/O of this package.

| file | what | who writes |
|---|---|---|
| ``<model>/lengths.model`` | the model in force (``quantile.ModelFile``) | whoever trained it; replaced atomically |
| ``<model>/<writer>.outcomes`` | LengthSamples, length-prefixed MessagePack, bounded | that tagger |
| ``<model>/<writer>.outcomes.1`` | the older half | that tagger |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from millrace.contracts.subjects import subject_token
from millrace.lengths.features import FEATURE_VERSION, FEATURES
from millrace.lengths.quantile import ModelUnreadable, decode_model
from millrace.lengths.samples import LengthRecord, LengthSample

MODEL_FILE = "lengths.model"
OUTCOMES = ".outcomes"
#: Outcomes in one file before it becomes the older half; two halves are kept. Some 500 bytes each.
OUTCOMES_MAX = 10_000
#: A longer frame is a damaged file, bytes.
FRAME_BYTES_MAX = 1 << 20
#: In place of a slash in the name of a model's folder: no subject token has it.
SLASH = "%2F"
#: Models that ship with the package, named as the served model.
PRETRAINED = Path(__file__).parent / "pretrained"

_HEADER = b"millrace-outcomes/2 %d %d\n" % (FEATURE_VERSION, len(FEATURES))
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(LengthSample)
_line = msgspec.json.Decoder(LengthRecord)


class OutcomesUnreadable(ValueError):
    """A file of outcomes that this version cannot learn from; the text names file and reason."""


def model_folder(root: Path, model: str) -> Path:
    """Return the folder of a served model's files. A served name may be a path; its folder lies below ``root``."""
    return root / subject_token(model).replace("/", SLASH)


def model_token(folder: Path) -> str:
    """Return the subject token of the model whose files lie in ``folder``."""
    return folder.name.replace(SLASH, "/")


def write_model(root: Path, model: str, payload: bytes) -> Path:
    """Puts a model in force, atomically.

    Raises:
        OSError: it cannot be written.
    """
    path = model_folder(root, model) / MODEL_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{MODEL_FILE}.{os.getpid()}")
    temporary.write_bytes(payload)
    temporary.replace(path)
    return path


def read_models(root: Path | None, *, shipped: bool) -> tuple[dict[str, bytes], dict[str, str]]:
    """Models that can be used, by served model (those of ``root`` before those that ship), and why others cannot."""
    found: dict[str, bytes] = {}
    problems: dict[str, str] = {}
    paths = [
        *(PRETRAINED.glob("*.lengths") if shipped else ()),
        *(root.glob(f"*/{MODEL_FILE}") if root is not None else ()),
    ]
    for path in paths:
        try:
            payload = path.read_bytes()
            found[decode_model(payload).file.model] = payload
        except OSError as error:
            problems[str(path)] = error.strerror or str(error)
        except ModelUnreadable as error:
            problems[str(path)] = str(error)
    return found, problems


class OutcomeWriter:
    """Appends to one tagger's file of one model; bounded to twice OUTCOMES_MAX outcomes."""

    def __init__(self, root: Path, model: str, writer: str) -> None:
        self._path = model_folder(root, model) / (subject_token(writer) + OUTCOMES)
        self._written = sum(1 for _ in read_outcomes(self._path)) if _begins_well(self._path) else None

    def append(self, samples: Sequence[LengthSample]) -> None:
        """Writes at the end.

        Raises:
            OSError: it cannot be written.
        """
        if self._written is None or self._written >= OUTCOMES_MAX:
            self._begin()
        frames = [_encoder.encode(sample) for sample in samples]
        with self._path.open("ab") as file:
            file.write(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))
        self._written = (self._written or 0) + len(frames)

    def _begin(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._written:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
        self._path.write_bytes(_HEADER)
        self._written = 0


def outcome_files(folder: Path, writer: str) -> list[Path]:
    """A tagger's files in a model's folder, older half first; those that exist."""
    path = folder / (subject_token(writer) + OUTCOMES)
    return [file for file in (path.with_name(path.name + ".1"), path) if file.exists()]


def read_outcomes(path: Path) -> Iterator[LengthSample]:
    """Reads a file of outcomes; one that ends inside a frame (the process was killed) ends before it.

    Raises:
        OutcomesUnreadable: it is none, is damaged, or holds other features. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.readline(200) != _HEADER:
            raise OutcomesUnreadable(f"{path}: no outcomes of this version's features ({_HEADER.decode().strip()})")
        while len(prefix := file.read(4)) == 4:
            size = int.from_bytes(prefix, "big")
            if size > FRAME_BYTES_MAX:
                raise OutcomesUnreadable(f"{path}: damaged, a frame of {size} bytes")
            frame = file.read(size)
            if len(frame) < size:
                return
            try:
                yield _decoder.decode(frame)
            except msgspec.DecodeError as error:
                raise OutcomesUnreadable(f"{path}: {error}") from None


def read_requests(lines: Iterator[bytes], name: str) -> Iterator[LengthRecord]:
    """Reads recorded requests, one JSON object a line.

    Raises:
        OutcomesUnreadable: a line is none; the text names file and line.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _line.decode(line)
        except msgspec.DecodeError as error:
            raise OutcomesUnreadable(f"{name}:{number}: {error}") from None


def load_warm(folder: Path, writer: str, limit: int) -> list[LengthSample]:
    """The newest outcomes that a tagger of this name wrote for a model; what cannot be read is skipped.

    Raises:
        OSError: a file cannot be read.
    """
    samples: list[LengthSample] = []
    for path in outcome_files(folder, writer):
        try:
            samples.extend(read_outcomes(path))
        except OutcomesUnreadable:
            continue  # of another version: it is begun anew with the next outcome
    return samples[-limit:]


def _begins_well(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline(200) == _HEADER
    except OSError:
        return False
