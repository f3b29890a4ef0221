"""The waiting queue of an engine, in one of two orders."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from millrace.enginemodel.parameters import QueuePolicy
from millrace.enginemodel.sequence import ScheduledSequence


class WaitingQueue(Protocol):
    """Sequences that wait for admission."""

    def append(self, sequence: ScheduledSequence) -> None: ...

    def put_back(self, sequence: ScheduledSequence) -> None: ...

    def first(self) -> ScheduledSequence:
        """The next to be admitted. The queue is not empty."""
        ...

    def pop(self) -> ScheduledSequence: ...

    def remove(self, sequence: ScheduledSequence) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ScheduledSequence]: ...


class ArrivalQueue:
    """First come, first served; the preempted go to the head."""

    def __init__(self) -> None:
        self._queue: deque[ScheduledSequence] = deque()

    def append(self, sequence: ScheduledSequence) -> None:
        self._queue.append(sequence)

    def put_back(self, sequence: ScheduledSequence) -> None:
        self._queue.appendleft(sequence)

    def first(self) -> ScheduledSequence:
        return self._queue[0]

    def pop(self) -> ScheduledSequence:
        return self._queue.popleft()

    def remove(self, sequence: ScheduledSequence) -> None:
        self._queue.remove(sequence)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return iter(self._queue)


class PriorityQueue:
    """Smallest (priority, arrival, id) first; the preempted take the place that these give them."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str, ScheduledSequence]] = []

    def append(self, sequence: ScheduledSequence) -> None:
        heapq.heappush(self._heap, (sequence.priority, sequence.arrival_ns, sequence.sequence, sequence))

    def put_back(self, sequence: ScheduledSequence) -> None:
        self.append(sequence)

    def first(self) -> ScheduledSequence:
        return self._heap[0][3]

    def pop(self) -> ScheduledSequence:
        return heapq.heappop(self._heap)[3]

    def remove(self, sequence: ScheduledSequence) -> None:
        self._heap = [entry for entry in self._heap if entry[3] is not sequence]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        return (entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3]))


def waiting_queue(policy: QueuePolicy) -> WaitingQueue:
    """An empty queue of this order."""
    return PriorityQueue() if policy is QueuePolicy.PRIORITY else ArrivalQueue()
