"""Compiled from native/enginemodel; what the arguments mean stands in libs/millrace/enginemodel/forecast/."""

from collections.abc import Sequence
from typing import Any

INTERFACE: int

_Curve = tuple[Sequence[int], Sequence[int], Sequence[int]]

class StepCost:
    def __init__(
        self,
        *,
        fixed: int,
        decode: int,
        prefill_token: int,
        context_token: int,
        tail_token: int,
        tail_decodes: int,
        prefill_half_work: int,
        mixed_decode: int,
        mixed_context_token: int,
        mixed_work: int,
        tokens: Sequence[_Curve],
        sequences: Sequence[_Curve],
        decode_context: Sequence[_Curve],
        prefill_work: Sequence[_Curve],
        mixed_context: Sequence[_Curve],
        prefill_granularity: int,
    ) -> None: ...

class Limits:
    def __init__(
        self,
        *,
        max_model_len: int,
        block_size: int,
        max_sequences: int,
        token_budget: int,
        long_prefill_token_threshold: int,
        chunked_prefill: bool,
        reserve_full_prompt: bool,
        watermark: float,
        async_scheduling: bool,
        groups: list[tuple[int, int]] = ...,
    ) -> None: ...

class Forecaster:
    def __init__(self, limits: Limits, cost: StepCost, default_output_tokens: int, /) -> None: ...
    def load(
        self,
        running: list[Any],
        waiting: list[Any],
        blocks_free: int,
        cached: list[int] | None,
        leave_at: int,
    ) -> None: ...
    def place(
        self, at_ns: int, prompt: int, output: int, final_tokens: int, sequences: int, cached: int, /
    ) -> None: ...
    def set_scale(self, scale: float, /) -> None: ...
    def ask(
        self,
        now_ns: int,
        prompt: int,
        output: int,
        final_tokens: int,
        sequences: int,
        cached: int,
        with_delay: bool,
        /,
    ) -> tuple[int, int, int, int, int, int, int, int]: ...
    def curve(self, now_ns: int, spacing_ns: int, points: int, /) -> list[tuple[int, int, int, int, int, int]]: ...
    def leave(self, now_ns: int, position: int, /) -> tuple[int, int, int, int] | None: ...
    def join(
        self, now_ns: int, at_ns: int, prompt: int, output: int, final_tokens: int, /
    ) -> tuple[int, int, int, int, int, int, int]: ...

def simulate(
    limits: Limits, cost: StepCost, blocks: int, requests: Sequence[tuple[int, int, int, int]]
) -> list[tuple[int, int]]: ...
