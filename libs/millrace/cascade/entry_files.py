"""The file of a choice of tiers by prompt. The only I/O of entry tiers.

It lies beside the judge of the cascade's largest model, as JSON (ENTRY_FILE). It names the weights of all models whose
answers it was fitted to, and is refused for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from millrace.cascade.entry import EntryFile, EntryModel
from millrace.files import replace_file
from millrace.kvcopy.weights import weights_fingerprint

FORMAT = "millrace-entry/1"

#: Below the folder of the cascade's largest model.
ENTRY_FILE = Path("judge") / "entry.json"


class EntryUnreadable(ValueError):
    """A file that is no choice of tiers of this version, or of other models; the text names file and reason."""


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str = FORMAT
    entry: EntryFile


def read_entry(path: Path, *, folders: Sequence[Path] = ()) -> EntryModel:
    """Reads a choice of tiers.

    Args:
        folders: Of the models of the tiers, smallest first; empty for any.

    Raises:
        EntryUnreadable: it is torn, of another version, or was fitted to other models.
        OSError: it cannot be read.
    """
    try:
        told = msgspec.json.decode(path.read_bytes(), type=_File)
        model = EntryModel(told.entry)
    except (msgspec.DecodeError, ValueError) as error:
        raise EntryUnreadable(f"{path}: {error}") from None
    if told.format != FORMAT:
        raise EntryUnreadable(f"{path}: format {told.format}, not {FORMAT}")
    if folders and fingerprints(folders) != told.entry.fingerprints:
        names = ", ".join(folder.name for folder in folders)
        raise EntryUnreadable(f"{path}: fitted to {', '.join(told.entry.models)}, not to the weights of {names}")
    return model


def write_entry(path: Path, file: EntryFile) -> None:
    """Writes a choice of tiers, atomically.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(path, msgspec.json.encode(_File(entry=file)) + b"\n")


def fingerprints(folders: Sequence[Path]) -> tuple[str, ...]:
    """Of the weights in each folder; empty where one holds none."""
    return tuple(weights_fingerprint(folder) for folder in folders)
