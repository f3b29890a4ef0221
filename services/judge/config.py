"""Configuration of the judge."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import WIRED


class JudgeConfig(ProcessConfig, frozen=True, kw_only=True):
    """Configuration of a judge process.

    Attributes:
        name: Unique name on the bus.
        judge: A name of ``JUDGES``, a file or an entry point.
        parameters: The judge's parameters.
        url: Base URL of the API through which the model is asked, such as ``http://127.0.0.1:8000/v1``: the cluster's
            own or another one.
        model: Name of the judging model there.
        key_file: File that holds the API key; empty for none.
        timeout_s: For one question, seconds; the asker has a deadline of its own.
    """

    name: Annotated[str, WIRED] = "judge-0"
    judge: Annotated[str, WIRED] = "llm"
    parameters: Annotated[dict[str, Any], WIRED] = {}
    url: Annotated[Annotated[str, msgspec.Meta(pattern="^https?://")], WIRED] = "http://127.0.0.1:8000/v1"
    model: Annotated[str, WIRED] = ""
    key_file: Annotated[str, WIRED] = ""
    timeout_s: Annotated[Annotated[float, msgspec.Meta(gt=0)], WIRED] = 2.0
