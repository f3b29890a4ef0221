"""A sequence in a forecast."""

from __future__ import annotations

from millrace.enginemodel.sequence import ScheduledSequence


class FutureSequence(ScheduledSequence):
    """A sequence that ends at an assumed length.

    Attributes:
        ends_total: Prompt and output at its end, tokens.
        arrives_fs: When it comes; 0 for those in the snapshot.
        joined_fs: Begin of the first step whose scheduling could see it.
        token_fs: When each of its new tokens was there.
    """

    __slots__ = ("arrives_fs", "ends_total", "joined_fs", "token_fs")

    def __init__(self, *, prompt_tokens: int, output_tokens: int, final_tokens: int, arrives_fs: int = 0) -> None:
        present = prompt_tokens + output_tokens
        super().__init__("", [0] * present, prompt_tokens=prompt_tokens, max_tokens=final_tokens)
        self.ends_total = prompt_tokens + final_tokens
        self.arrives_fs = arrives_fs
        self.joined_fs = 0
        self.token_fs: list[int] = []
