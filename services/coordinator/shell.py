"""Carries out the coordinator's own effects: planning of cascades in child processes, the recording in a folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from millrace.actor.child_process import run_in_child
from millrace.actor.effects import Effect
from millrace.actor.task_shell import TaskShell
from millrace.cascade.jobs import plan_in_child
from millrace.workloads.recording import RecordingBegan, RecordingFolder

from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed, PlanCascade
from services.coordinator.config import CoordinatorConfig
from services.coordinator.recorder import KeepRows, RecordingFailed


class CoordinatorShell(TaskShell):
    """The shell of one coordinator process."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__()
        self._folder = Path(config.recording)
        self._recording = _recording(self._folder, config.name) if config.recording else None

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {PlanCascade: lambda effect: self.spawn(self._plan(effect)), KeepRows: self._on_keep_rows}

    def close(self) -> None:
        """Ends planners that run; their processes are killed."""
        super().close()
        if self._recording is not None:
            self._recording.close()

    def _on_keep_rows(self, effect: KeepRows) -> None:
        assert self._recording is not None
        try:
            self._recording.on_cluster(_cluster_of(self._folder))
            self._recording.append(effect.rows, time.time_ns())
        except OSError as error:
            self.tell(RecordingFailed(detail=str(error)))

    async def _plan(self, effect: PlanCascade) -> None:
        try:
            result = await asyncio.wait_for(run_in_child(plan_in_child, effect.job), effect.limit_s)
        except TimeoutError:
            self.tell(CascadePlanningFailed(key=effect.key, detail=f"it took over {effect.limit_s:g} s"))
        except (OSError, msgspec.DecodeError, ChildProcessError) as error:
            self.tell(CascadePlanningFailed(key=effect.key, detail=str(error)))
        else:
            self.tell(CascadePlanned(key=effect.key, result=result))


def _recording(folder: Path, name: str) -> RecordingFolder:
    return RecordingFolder(folder, RecordingBegan(run=time.time_ns(), origin="millrace"), name)


def _cluster_of(folder: Path) -> str:
    """The cluster's file, which stands beside the folder of its recording; `millrace apply` replaces it."""
    file = folder.parent / "run" / "cluster.toml"
    return file.read_text() if file.is_file() else ""
