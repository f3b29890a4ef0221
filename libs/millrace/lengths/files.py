"""Storage of outcomes and models: a folder with one sub-folder per served model. The only I/O of this package.

| file | what | who writes |
|---|---|---|
| ``<model>/lengths.model`` | the model in force (``quantile.ModelFile``) | whoever trained it; replaced atomically |
| ``<model>/<writer>.outcomes`` | LengthSamples (``frames.py``) | that tagger |
| ``<model>/<writer>.outcomes.1`` | the older half | that tagger |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from millrace.contracts.subjects import subject_token
from millrace.files import replace_file
from millrace.lengths.features import FEATURE_VERSION, FEATURES
from millrace.lengths.frames import FileUnreadable, FrameWriter, older, read_frames, read_header
from millrace.lengths.quantile import ModelUnreadable, decode_model
from millrace.lengths.samples import LengthSample

MODEL_FILE = "lengths.model"
OUTCOMES = ".outcomes"
#: Outcomes in one file before it becomes the older half; two halves are kept. Some 500 bytes each.
OUTCOMES_MAX = 10_000
#: In place of a slash in the name of a model's folder: no subject token has it.
SLASH = "%2F"
#: Models that ship with the package, named as the served model.
PRETRAINED = Path(__file__).parent / "pretrained"

_HEADER = b"millrace-outcomes/2 %d %d\n" % (FEATURE_VERSION, len(FEATURES))
_decoder = msgspec.msgpack.Decoder(LengthSample)


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
    replace_file(path, payload)
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


def outcome_writer(root: Path, model: str, writer: str) -> FrameWriter:
    """Appends to one tagger's file of one model; bounded to twice OUTCOMES_MAX outcomes."""
    path = model_folder(root, model) / (subject_token(writer) + OUTCOMES)
    written = sum(1 for _ in read_outcomes(path)) if _begins_well(path) else None
    return FrameWriter(path, _HEADER, values_max=OUTCOMES_MAX, written=written)


def outcome_files(folder: Path, writer: str) -> list[Path]:
    """A tagger's files in a model's folder, older half first; those that exist."""
    path = folder / (subject_token(writer) + OUTCOMES)
    return [file for file in (older(path), path) if file.exists()]


def read_outcomes(path: Path) -> Iterator[LengthSample]:
    """Reads a file of outcomes.

    Raises:
        FileUnreadable: it is none, is damaged, or holds other features. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if read_header(file) != _HEADER:
            raise FileUnreadable(f"{path}: no outcomes of this version's features ({_HEADER.decode().strip()})")
        yield from read_frames(file, _decoder)


def load_warm(folder: Path, writer: str, limit: int) -> list[LengthSample]:
    """The newest outcomes that a tagger of this name wrote for a model; what cannot be read is skipped.

    Raises:
        OSError: a file cannot be read.
    """
    samples: list[LengthSample] = []
    for path in outcome_files(folder, writer):
        try:
            samples.extend(read_outcomes(path))
        except FileUnreadable:
            continue  # of another version: it is begun anew with the next outcome
    return samples[-limit:]


def _begins_well(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return read_header(file) == _HEADER
    except OSError:
        return False
