"""The modelled engine under the load of ``bench segments``: its blocks have the very ids that vLLM has, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.kvcache.segment_pool import SegmentPool
from millrace.kvcache.segments import runs


class Ended(NamedTuple):
    """A request, just before its blocks were freed."""

    number: int
    hit_tokens: int
    blocks: int
    runs: int
    preemptions: int


class ModelledRun:
    """One run of all requests.

    Attributes:
        steps, seconds: How many it took, and how long.
    """

    def __init__(self, parameters: EngineParameters, *, window: int, hit_window: int) -> None:
        self._scheduler = Scheduler(parameters)
        if parameters.segments:
            kind = type("Windowed", (SegmentPool,), {"__slots__": (), "window": window, "hit_window": hit_window})
            self._scheduler.pool = kind(parameters.blocks_total, caching=parameters.prefix_caching)
        self.steps = 0
        self.seconds = 0.0

    def all(self, requests: Iterable[tuple[list[int], int]], *, clients: int) -> list[Ended]:
        """Keeps so many requests in the engine until all are done."""
        began = time.perf_counter()
        waiting = enumerate(requests)
        under_way = 0
        ended: list[Ended] = []
        while True:
            while under_way < clients and (following := next(waiting, None)):
                number, (prompt, tokens) = following
                sequence = ScheduledSequence(str(number), prompt, prompt_tokens=len(prompt), max_tokens=tokens)
                self._scheduler.add(sequence)
                under_way += 1
            if not under_way:
                self.seconds = time.perf_counter() - began
                return ended
            ended += self._step()
            under_way = len(self._scheduler.running) + len(self._scheduler.waiting)

    def _step(self) -> list[Ended]:
        self.steps += 1
        done = []
        for sequence in self._scheduler.schedule().sampling:
            sequence.append(-1 - int(sequence.sequence))  # nobody shares an output
            if sequence.total - sequence.prompt_tokens >= sequence.max_tokens:
                done.append(_ended(sequence))
                self._scheduler.remove(sequence)
        return done


def _ended(sequence: ScheduledSequence) -> Ended:
    return Ended(
        int(sequence.sequence),
        sequence.hit_tokens or 0,
        len(sequence.blocks),
        runs(sequence.blocks),
        sequence.preemptions,
    )
