"""Carries out the coordinator's own effects: the recording in a folder; plans of cascades and replays of the recording
in child processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from millrace.actor.child_process import run_in_child, run_python
from millrace.actor.effects import Effect
from millrace.actor.task_shell import TaskShell
from millrace.cascade.jobs import plan_in_child
from millrace.workloads.recording import RecordingBegan, RecordingFolder

from services.coordinator.adopting import ApplySettings, LoadReplayed
from services.coordinator.autopilot import ClusterChanged, ReplayFailed, ReplayLoad, SettingsApplied
from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed, PlanCascade
from services.coordinator.config import CoordinatorConfig
from services.coordinator.recorder import KeepRows, RecordingFailed

#: A replay takes what nobody else wants.
NICENESS_MAX = 19


class CoordinatorShell(TaskShell):
    """The shell of one coordinator process."""

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__()
        self._folder = Path(config.recording)
        self._recording = _recording(self._folder, config.name) if config.recording else None
        self._cluster = ""

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        return {
            PlanCascade: lambda effect: self.spawn(self._plan(effect)),
            KeepRows: self._on_keep_rows,
            ReplayLoad: lambda effect: self.spawn(self._replay(effect)),
            ApplySettings: lambda effect: self.spawn(self._apply(effect)),
        }

    def close(self) -> None:
        """Ends planners that run; their processes are killed."""
        super().close()
        if self._recording is not None:
            self._recording.close()

    def _on_keep_rows(self, effect: KeepRows) -> None:
        assert self._recording is not None
        try:
            if (cluster := _cluster_of(self._folder)) != self._cluster:
                self._cluster = cluster
                self._recording.on_cluster(cluster)
                self.tell(ClusterChanged(text=cluster))
            self._recording.append(effect.rows, time.time_ns())
        except OSError as error:
            self.tell(RecordingFailed(detail=str(error)))

    async def _plan(self, effect: PlanCascade) -> None:
        try:
            result = await asyncio.wait_for(run_in_child(plan_in_child, effect.job), effect.limit_s)
            self.tell(CascadePlanned(key=effect.key, result=result))
        except (OSError, msgspec.DecodeError) as error:
            detail = str(error) or f"it took over {effect.limit_s:g} s"
            self.tell(CascadePlanningFailed(key=effect.key, detail=detail))

    async def _replay(self, effect: ReplayLoad) -> None:
        """Asks `millrace what-if`; the simulator stands above the services."""
        with TemporaryDirectory(prefix="millrace-autopilot-") as folder:
            answer = Path(folder) / "answer.json"
            window = ("--last", f"{effect.last_s:g}", "--most", str(effect.requests_max), "--output", str(answer))
            words = ("what-if", "--advise", "--dir", str(self._folder.parent), *window, "--jobs", "1")
            beside = (f"--set={effect.beside}",) if effect.beside else ()
            command = run_python("millrace.cli", *words, *beside, niceness=NICENESS_MAX)
            try:
                await asyncio.wait_for(command, effect.limit_s)
                self.tell(msgspec.json.decode(answer.read_bytes(), type=LoadReplayed))
            except (OSError, msgspec.DecodeError) as error:
                self.tell(ReplayFailed(detail=str(error) or f"it took over {effect.limit_s:g} s"))

    async def _apply(self, effect: ApplySettings) -> None:
        """Asks `millrace apply`, as a person would: the same steps in the same order, each with its limit."""
        words = ("apply", "--dir", str(self._folder.parent), "--sender", "autopilot", "--reason", effect.reason)
        try:
            await run_python("millrace.cli", *words, *(f"--set={each}" for each in effect.settings.split()), niceness=0)
            self.tell(SettingsApplied())
        except OSError as error:
            self.tell(SettingsApplied(failed=str(error) or "it was ended"))


def _recording(folder: Path, name: str) -> RecordingFolder:
    return RecordingFolder(folder, RecordingBegan(run=time.time_ns(), origin="millrace"), name)


def _cluster_of(folder: Path) -> str:
    """The cluster's file, which stands beside the folder of its recording; `millrace apply` replaces it."""
    file = folder.parent / "run" / "cluster.toml"
    return file.read_text() if file.is_file() else ""
