"""A scheduler that makes no step before a test has granted it: no sequence ends unseen, however busy the machine is.

The grant is a number in a file of 8 bytes, the steps that the engine may have made; the file's path is in PACE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from services.worker.vllm_engine.snapshot_scheduler import SnapshotScheduler

#: Environment variable with the path.
PACE = "MILLRACE_CONTRACT_PACE"
#: An engine that waits for a grant looks for it so often, and hears questions after so many looks.
LOOK_S, LOOKS = 0.0005, 40


class PacedScheduler(SnapshotScheduler):
    """Schedules nothing while every granted step is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pace = Path(os.environ[PACE])
        super().__init__(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedules a batch, empty where it has to wait."""
        for _ in range(LOOKS):
            if self._steps < int.from_bytes(self._pace.read_bytes()):
                return super().schedule(*args, **kwargs)
            time.sleep(LOOK_S)
        budget, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, 0
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = budget
