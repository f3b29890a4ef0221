"""Trains in a process of its own: ``python -m millrace.lengths.child`` reads a TrainingJob, writes a TrainingResult.

Both are MessagePack, on standard input and output. The process is nice: serving goes first.
"""

from __future__ import annotations

import os
import sys

import msgspec

from millrace.lengths.samples import LengthSample
from millrace.lengths.training import train_candidate

#: Training yields to everything that serves.
NICENESS = 10


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of ``train_candidate``."""

    model: str
    samples: list[LengthSample]
    incumbent: bytes
    at_ns: int


def main() -> None:
    """Reads, trains, writes."""
    os.nice(NICENESS)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TrainingJob)
    result = train_candidate(job.samples, model=job.model, incumbent=job.incumbent, trained_ns=job.at_ns)
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))


if __name__ == "__main__":
    main()
