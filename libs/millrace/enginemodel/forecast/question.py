"""What is asked of a forecast, and what it answers."""

from __future__ import annotations

import msgspec

from millrace.enginemodel.parameters import EngineParameters


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an instance does not have yet, asked about or on its way there. Lengths in tokens.

    Attributes:
        prompt_tokens: Length of the prompt.
        output_tokens: Output decoded elsewhere already, which has to be computed again (a continuation).
        expected_output_tokens: Predicted length of the whole output, ``output_tokens`` included; None if unknown.
        max_tokens: The client's bound of the whole output; 0 for none.
        sequences: Choices that are placed together.
        cached_tokens: In the instance's prefix cache when the engine looks there: whole blocks, and fewer than there
            are tokens. They are not computed, but their blocks count as taken.
    """

    prompt_tokens: int
    output_tokens: int = 0
    expected_output_tokens: int | None = None
    max_tokens: int = 0
    sequences: int = 1
    cached_tokens: int = 0

    def refusal(self, parameters: EngineParameters) -> str | None:
        """Why an engine would not take it; None where it would."""
        present, limit = self.prompt_tokens + self.output_tokens, parameters.max_model_len
        if self.prompt_tokens < 1 or self.output_tokens < 0 or self.sequences < 1:
            return "a request has at least one prompt token and one sequence"
        if not 0 <= self.cached_tokens < present:
            return f"{self.cached_tokens} cached tokens of {present}: at least one is always computed"
        if present >= limit:
            return f"{present} tokens leave no room for output in max_model_len = {limit}"
        if 0 < self.max_tokens <= self.output_tokens:
            return f"{self.output_tokens} tokens are there already, max_tokens is {self.max_tokens}"
        return None


class Placement(msgspec.Struct, frozen=True):
    """A candidate that an instance was given and does not show yet.

    Attributes:
        at_ns: When it was given, unix ns; what lies before the snapshot counts as its moment.
    """

    candidate: Candidate
    at_ns: int = 0


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What would happen if the instance took the candidate now. Times in ns, counted from now.

    Attributes:
        ttft_ns: Until the first new token of any of the candidate's sequences.
        e2e_ns: Until the last token of all of them.
        tpot_mean_ns: Mean time per new token after the first, over all of its sequences; 0 where there is no second.
        tpot_worst_ns: Longest pause between two tokens of one of its sequences.
        blocks_peak: Most KV blocks in use at the instance while the candidate is there.
        preemptions: Preemptions at the instance in that time.
        others: Sequences that are there already, placements on their way included.
        others_delay_ns: Sum over these of how much later each ends for the candidate; may be negative.
        output_tokens: Length of the whole output that was assumed, per sequence.
    """

    ttft_ns: int
    e2e_ns: int
    tpot_mean_ns: int
    tpot_worst_ns: int
    blocks_peak: int
    preemptions: int
    others: int
    others_delay_ns: int
    output_tokens: int
