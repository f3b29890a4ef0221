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
from millrace.actor.runtime_nats import ActorHandle
from millrace.cascade.jobs import PlanningJob, PlanningResult
from millrace.workloads.recording import RecordingBegan, RecordingFolder

from services.coordinator.cascade_effects import CascadePlanned, CascadePlanningFailed, PlanCascade
from services.coordinator.config import CoordinatorConfig
from services.coordinator.recorder import KeepRows, RecordingFailed


class CoordinatorShell:
    """The shell of one coordinator process. Its methods run on the event loop; planning runs beside it."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._recording = _recording(Path(config.recording)) if config.recording else None
        self._tasks: set[asyncio.Task[None]] = set()
        self._handle: ActorHandle | None = None

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        """One for each effect of services/coordinator/cascade_effects.py, and of the recorder."""
        return {PlanCascade: self._on_plan, KeepRows: self._on_keep_rows}

    def attach(self, handle: ActorHandle) -> None:
        """Results go there."""
        self._handle = handle

    def close(self) -> None:
        """Ends planners that run; their processes are killed."""
        for task in self._tasks:
            task.cancel()
        if self._recording is not None:
            self._recording.close()

    def _on_keep_rows(self, effect: KeepRows) -> None:
        assert self._recording is not None
        assert self._handle is not None
        try:
            self._recording.append(effect.rows, time.time_ns())
        except OSError as error:
            self._handle.deliver(RecordingFailed(detail=str(error)))

    def _on_plan(self, effect: PlanCascade) -> None:
        task = asyncio.get_running_loop().create_task(self._plan(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _plan(self, effect: PlanCascade) -> None:
        assert self._handle is not None
        try:
            result = await asyncio.wait_for(run_planner(effect.job), effect.limit_s)
        except TimeoutError:
            detail = f"it took over {effect.limit_s:g} s"
            self._handle.deliver(CascadePlanningFailed(key=effect.key, detail=detail))
        except (OSError, msgspec.DecodeError, ChildProcessError) as error:
            self._handle.deliver(CascadePlanningFailed(key=effect.key, detail=str(error)))
        else:
            self._handle.deliver(CascadePlanned(key=effect.key, result=result))


def _recording(folder: Path) -> RecordingFolder:
    """The recording of this run, with the cluster's file, which stands beside its folder."""
    file = folder.parent / "run" / "cluster.toml"
    cluster = file.read_text() if file.is_file() else ""
    return RecordingFolder(folder, RecordingBegan(run=time.time_ns(), cluster=cluster, origin="millrace"))


async def run_planner(job: PlanningJob) -> PlanningResult:
    """Plan in a child process.

    Raises:
        ChildProcessError: it failed; the text is the end of its complaint.
    """
    output = await run_in_child("millrace.cascade.child", msgspec.msgpack.encode(job))
    return msgspec.msgpack.decode(output, type=PlanningResult)
