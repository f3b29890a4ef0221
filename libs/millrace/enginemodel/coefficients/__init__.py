"""Fitted coefficients of step-time models, one TOML file each, and their reader.

Reading is done once, by whoever builds an engine; the model itself does no I/O. Each file says what was measured,
on what, and how far the fit is off.
"""

from __future__ import annotations

from importlib import resources

import msgspec

from millrace.enginemodel.steptime import LinearStepTime


def coefficient_names() -> list[str]:
    """Names of the sets that ship with the package."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load_coefficients(name: str) -> LinearStepTime:
    """The set of this name.

    Raises:
        ValueError: there is none; the message lists those there are. Or the file is wrong.
    """
    file = resources.files(__package__) / f"{name}.toml"
    if not file.is_file():
        raise ValueError(f"step-time coefficients {name!r}: unknown, there are {', '.join(coefficient_names())}")
    return msgspec.toml.decode(file.read_bytes(), type=LinearStepTime)
