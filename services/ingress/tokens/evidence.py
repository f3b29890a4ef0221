"""Evidence about an answer: the log-probability of each token that its engine chose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from millrace.contracts.ingress import TokenLogprobs
from millrace.judging.evidence import RunningEvidence


class TokenEvidence:
    """Log-probabilities of a sequence's log, token by token.

    Attributes:
        logprobs: One per token of the log; NaN where the engine gave none, which makes the answer unjudgeable.
        running: The same, summed up as they come; tokens without a log-probability are left out.
    """

    __slots__ = ("logprobs", "running")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.running = RunningEvidence()

    def take(self, entries: Sequence[TokenLogprobs] | None, tokens: int) -> None:
        """Add the entries of so many new tokens."""
        if tokens == 1 and entries and entries[0].logprobs:  # as engines send them
            value = entries[0].logprobs[0]
            self.logprobs.append(value)
            self.running.add((value,) if value == value else ())
            return
        given = [entry.logprobs[0] if entry.logprobs else math.nan for entry in (entries or ())[:tokens]]
        self.logprobs += given + [math.nan] * (tokens - len(given))
        self.running.add([value for value in given if not math.isnan(value)])

    def drop(self, tokens: int) -> None:
        """Take the latest tokens back: they follow a stop string."""
        del self.logprobs[-tokens:]
        self.running = RunningEvidence()
        self.running.add([value for value in self.logprobs if not math.isnan(value)])
