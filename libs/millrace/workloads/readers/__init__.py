"""Readers of public traces by format. Each gives rows with lengths, with times where the trace has them, and refuses
what is wrong with file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from millrace.workloads.readers import azure, burstgpt, mooncake, openai, servegen, sharegpt
from millrace.workloads.recording import read_recording
from millrace.workloads.shape import Arrival

#: Format -> reader of a file or folder. Times of traces without any are all 0.
READERS: Mapping[str, Callable[[Path], list[Arrival]]] = MappingProxyType(
    {
        "azure": azure.read,
        "burstgpt": burstgpt.read,
        "mooncake": mooncake.read,
        "openai": openai.read,
        "recording": lambda path: read_recording(path).arrivals(),
        "sharegpt": sharegpt.read,
    }
)

#: Formats whose file holds arrival times.
TIMED = frozenset(READERS) - {"sharegpt"}

__all__ = ["READERS", "TIMED", "servegen"]
