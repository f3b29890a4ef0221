"""A scheduler that writes down when it did what, for `bench migration_watch`.

Runs inside the engine process; vLLM finds it by its path. One line of JSON per event in the folder that the environment
names; times are monotonic ns, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

from bench.migration.watching import FOLDER
from services.worker.vllm_engine.names import sequence_of
from services.worker.vllm_engine.snapshot_scheduler import SnapshotScheduler


class WatchedScheduler(SnapshotScheduler):
    """Notes steps, commands about KV, and arrivals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines = (Path(os.environ[FOLDER]) / f"engine-{os.getpid()}.jsonl").open("w", buffering=1)
        self._scheduled: list[tuple[int, int, int, list[str]]] = []
        self._mover_watched = False

    def note(self, kind: str, **fields: Any) -> None:
        """One line."""
        self._lines.write(json.dumps({"kind": kind, **fields}) + "\n")

    def add_request(self, request: Any) -> None:
        """Notes how long taking a sequence took: with a handover its last blocks are read in it."""
        began = time.monotonic_ns()
        super().add_request(request)
        self.note("add", sequence=sequence_of(request.request_id), began=began, ended=time.monotonic_ns())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Notes when a step began and what was new in it."""
        self._watch_mover()
        began, cpu = time.monotonic_ns(), time.thread_time_ns()
        output = super().schedule(*args, **kwargs)
        new = [sequence_of(entry.req_id) for entry in output.scheduled_new_reqs]
        self._scheduled.append((began, cpu, time.monotonic_ns(), new))
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Notes when it ended, who took part, how much of it this thread computed, and what it waited for."""
        computed = time.monotonic_ns()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        began, cpu, scheduled, new = self._scheduled.pop(0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.note(
            "step",
            began=began,
            scheduled=scheduled,
            computed=computed,
            ended=time.monotonic_ns(),
            cpu=time.thread_time_ns() - cpu,
            faults=used.ru_minflt + used.ru_majflt,
            displaced=used.ru_nivcsw,
            new=new,
            sequences=[sequence_of(name) for name in scheduler_output.num_scheduled_tokens],
            tokens=scheduler_output.total_num_scheduled_tokens,
            waiting=len(self.waiting) + len(self.kv_holding_waiting),
        )
        return outputs

    def _watch_mover(self) -> None:
        if self.mover is None or self._mover_watched:
            return
        self._mover_watched = True
        handle = self.mover.handle

        def handled(call: Any) -> Any:
            began = time.monotonic_ns()
            answer = handle(call)
            fields = {"command": type(call.command).__name__, "migration": call.command.migration}
            self.note("move", **fields, began=began, ended=time.monotonic_ns())
            return answer

        self.mover.handle = handled  # type: ignore[method-assign]
