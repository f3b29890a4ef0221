"""Questions to a forecast, and its answers; that for a candidate is contracts.predictor.Forecast."""

from __future__ import annotations

import msgspec

from millrace.enginemodel.parameters import EngineParameters


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an instance does not have yet, asked about or on its way there. Lengths in tokens.

    Attributes:
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
        """Return the reason why an engine would not take the candidate; None if it would."""
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


class ReplicaRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of known length that an engine is to serve.

    Attributes:
        prompt_tokens, output_tokens: Both at least 1; their sum at most ``max_model_len``.
        kv_tokens: Tokens of the prompt whose KV comes along, less than ``prompt_tokens``: computed elsewhere, and read
            when it arrives. Those of the last, partial block are computed again.
    """

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int = 0


class LoadForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast load of an instance if no other sequence comes, at evenly spaced moments from now on.

    Each entry is the state during the last step that began before its moment, or that of the snapshot if none began.

    Attributes:
        spacing_ns: Between two moments; the first one is now.
        tokens: Tokens with KV, those that the step computes included.
        ended: Of the sequences that are there now, or on their way: how many have ended or left before the moment.
        preemptions: Since now, to form the steps begun before the moment.
    """

    spacing_ns: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    ended: tuple[int, ...]
    preemptions: tuple[int, ...]
    blocks_total: int


class LeaveForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Effect on the other sequences if one leaves at the end of the step under way. Times in ns.

    Attributes:
        relieved_ns: Sum over the others of how much sooner each ends; negative where it delays others.
        preemptions_avoided: Preemptions at the instance until all have ended, with it less without it; may be negative.
        others: Sequences that are there, placements on their way included, without it.
        rest_ns: From now until it would end here, or leave at its stage's boundary.
        rest_tokens: It would generate until then, from the snapshot on.
    """

    relieved_ns: int
    preemptions_avoided: int
    others: int
    rest_ns: int
    rest_tokens: int


class JoinForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Effect on the other sequences if one comes with its KV, and its own forecast. Times in ns, from now.

    Attributes:
        others_delay_ns: Sum over the others of how much later each ends; may be negative.
        preemptions: Preemptions at the instance until all have ended, with it less without it; may be negative.
        others: Sequences that are there, placements on their way included.
        blocks_peak: Most KV blocks in use from its first step until its end.
        start_ns: Until its first step begins, which needs a place and blocks for all its tokens.
        e2e_ns: Until its last token.
        pace_ns: Mean time per token from its first step on.
        output_tokens: Length of the whole output that was assumed.
    """

    others_delay_ns: int
    preemptions: int
    others: int
    blocks_peak: int
    start_ns: int
    e2e_ns: int
    pace_ns: int
    output_tokens: int
