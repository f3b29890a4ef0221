"""Plans in a process of its own: ``python -m millrace.cascade.child`` reads a PlanningJob, writes a PlanningResult.

Both are MessagePack, on standard input and output. The process is nice: serving goes first.
"""

from __future__ import annotations

import os
import sys

import msgspec

from millrace.cascade.jobs import PlanningJob, plan_job
from millrace.enginemodel.registered import load_step_times

#: Planning yields to everything that serves.
NICENESS = 10


def main() -> int:
    """Reads, plans, writes; 1 with a sentence on standard error where it cannot."""
    os.nice(NICENESS)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=PlanningJob)
    files = {tier.step_time: tier.step_time for tier in job.tiers if tier.step_time.endswith(".toml")}
    try:
        result = plan_job(job, load_step_times(files)[0])
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201  # to the process that waits for the result
        return 1
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
