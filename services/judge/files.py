"""Reads the files that a judge's configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from millrace.actor.errors import ConfigError
from millrace.judging.calibration import IsotonicCurve
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.files import JudgeUnreadable, read_judge

from services.judge.config import RemoteConfig


def read_judges(files: Mapping[str, str]) -> tuple[dict[str, ConfidenceModel], dict[str, str]]:
    """Confidence judges by served model, and why others could not be read."""
    judges: dict[str, ConfidenceModel] = {}
    problems: dict[str, str] = {}
    for model, path in files.items():
        try:
            judges[model] = read_judge(Path(path))
        except (JudgeUnreadable, OSError) as error:
            problems[model] = str(error)
    return judges, problems


def read_curve(remote: RemoteConfig) -> IsotonicCurve | None:
    """The calibration of a remote judge; None where none is configured.

    Raises:
        ConfigError: the file is no curve.
    """
    if not remote.curve_file:
        return remote.curve
    try:
        return msgspec.json.decode(Path(remote.curve_file).read_bytes(), type=IsotonicCurve)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"curve_file {remote.curve_file}: {error}") from None
