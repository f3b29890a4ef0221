"""Reads every step-time set that a predictor may need: those that ship, and files that its configuration names.

Done once, by whoever builds the actor; one that cannot be read is told and left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.enginemodel.coefficients import coefficient_names, load_step_time
from millrace.enginemodel.step_time_models import StepTimeModel


def read_step_times(files: Mapping[str, str]) -> tuple[dict[str, StepTimeModel], dict[str, str]]:
    """Sets by name, and for those that cannot be read, why.

    Args:
        files: Paths of further sets, by the name that instances give in their record.
    """
    found: dict[str, StepTimeModel] = {}
    unreadable: dict[str, str] = {}
    for name, origin in [*((name, name) for name in coefficient_names()), *files.items()]:
        try:
            found[name] = load_step_time(origin)
        except ValueError as error:
            found.pop(name, None)  # where a file shall stand in for a set that ships, that one is not meant
            unreadable[name] = str(error)
    return found, unreadable
