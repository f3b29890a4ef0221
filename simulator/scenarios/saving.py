"""A scenario's results as files: summary.json, requests.npz, timeline.npz, scenario.json, pictures; migrations.npz."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from simulator.scenarios.observer import EngineSample, FinishedRequest, MigrationRecord
from simulator.scenarios.running import ScenarioOutcome
from simulator.scenarios.statistics import Summary


def save(outcome: ScenarioOutcome, summary: Summary, folder: Path) -> None:
    """Writes everything but pictures into ``folder``, which is made where it is missing.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome.spec)) + b"\n")
    document = {**msgspec.to_builtins(summary), "outcomes": outcome.outcomes, "details": outcome.details}
    (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    np.savez_compressed(folder / "requests.npz", **columns(outcome.finished, FinishedRequest))
    np.savez_compressed(folder / "timeline.npz", **columns(outcome.samples, EngineSample))
    if outcome.migrations:
        np.savez_compressed(folder / "migrations.npz", **columns(outcome.migrations, MigrationRecord))


def columns(
    records: Sequence[FinishedRequest] | Sequence[EngineSample] | Sequence[MigrationRecord],
    kind: type[FinishedRequest] | type[EngineSample] | type[MigrationRecord],
) -> dict[str, Any]:
    """Records as one array per field."""
    return {name: np.array([getattr(record, name) for record in records]) for name in kind.__struct_fields__}
