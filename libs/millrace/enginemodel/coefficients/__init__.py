"""Fitted coefficients of step-time models, one TOML file each, and their reader.

Reading is done once, by whoever builds an engine; the model itself does no I/O. Each file says what was measured,
on what, and how far the fit is off.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from millrace.enginemodel.step_time_models import LinearStepTime


def coefficient_names() -> list[str]:
    """Names of the sets that ship with the package."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_step_time(name_or_path: str) -> LinearStepTime:
    """A set that ships, by name, or a file of the same form: anything with a slash in it, or that ends in ``.toml``.

    Raises:
        ValueError: there is none, it cannot be read, or a key of it is wrong; the message names file and key.
    """
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    return load_coefficients(name_or_path)


def load_coefficients(name: str) -> LinearStepTime:
    """The set of this name.

    Raises:
        ValueError: there is none; the message lists those there are. Or the file is wrong.
    """
    file = resources.files(__package__) / f"{name}.toml"
    if not name or not file.is_file():
        raise ValueError(f"step-time coefficients {name!r}: unknown, there are {', '.join(coefficient_names())}")
    return decode(file.read_bytes(), origin=f"{name}.toml")


def _read(path: Path) -> LinearStepTime:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"step-time coefficients {path}: cannot be read: {error.strerror}") from error
    return decode(content, origin=str(path))


def decode(content: bytes, *, origin: str) -> LinearStepTime:
    """A set out of a file's content.

    Raises:
        ValueError: naming ``origin`` and the key that is missing, unknown or wrong.
    """
    try:
        return msgspec.toml.decode(content, type=LinearStepTime)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"step-time coefficients {origin}: {error}") from error
