"""Readers of public traces by format. Each gives rows with lengths, with times where the trace has them, and refuses
what is wrong with file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from millrace.workloads.readers import azure, mooncake, servegen, sharegpt
from millrace.workloads.shape import Arrival

#: Format -> reader of a file or folder. Times of traces without any are all 0.
READERS: Mapping[str, Callable[[Path], list[Arrival]]] = MappingProxyType(
    {"azure": azure.read, "mooncake": mooncake.read, "sharegpt": sharegpt.read}
)

#: Formats whose file holds arrival times.
TIMED = frozenset({"azure", "mooncake"})

__all__ = ["READERS", "TIMED", "servegen"]
