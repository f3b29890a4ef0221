"""A sequence in a forecast, and the scheduler that has nothing but such."""

from __future__ import annotations

from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence


class FutureSequence(ScheduledSequence):
    """A sequence that ends at an assumed length.

    Attributes:
        cached_tokens: Of its prompt, expected to be in the prefix cache when it is admitted; 0 after a preemption.
        ends_total: Prompt and output at its end, tokens.
        arrives_fs: When it comes; 0 for those in the snapshot.
        joined_fs: Begin of the first step whose scheduling could see it.
        started_fs: Begin of its first step after its admission; None before it.
        token_fs: When each of its new tokens was there.
    """

    __slots__ = ("arrives_fs", "cached_tokens", "ends_total", "joined_fs", "started_fs", "token_fs")

    def __init__(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        final_tokens: int,
        arrives_fs: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        present = prompt_tokens + output_tokens
        super().__init__("", [0] * present, prompt_tokens=prompt_tokens, max_tokens=final_tokens)
        self.cached_tokens = cached_tokens
        self.ends_total = prompt_tokens + final_tokens
        self.arrives_fs = arrives_fs
        self.joined_fs = 0
        self.started_fs: int | None = None
        self.token_fs: list[int] = []


class FutureScheduler(Scheduler):
    """Counts tokens and blocks: what is cached of a prompt is known beforehand, and is not looked for in any block.

    Cached blocks count against memory like all others, although a running sequence may hold them already.
    """

    def _cached_tokens(self, sequence: ScheduledSequence, hits: list[int]) -> int:
        assert isinstance(sequence, FutureSequence)
        return sequence.cached_tokens

    def _preempt(self, sequence: ScheduledSequence) -> None:
        assert isinstance(sequence, FutureSequence)
        sequence.cached_tokens = 0  # memory is short: what it leaves is soon written over
        super()._preempt(sequence)
