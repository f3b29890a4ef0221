"""Assumed output length of each sequence; native/enginemodel/bindings has the same rules for those of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from millrace.contracts.status import SequenceStatus
from millrace.enginemodel.forecast.question import Candidate

#: What a sequence that reached its prediction is given further at least, again and again, tokens.
OUTRUN_TOKENS = 10


class LengthRevision(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and revision of predicted output lengths.

    A sequence keeps its predicted length for the first half of it. From then on it is assumed to go on for half of the
    prediction more: predictions miss by factors, and a sequence forecast to end too soon frees blocks and a place that
    others are then sent to.

    Attributes:
        default_output_tokens: Where nothing was predicted.
        leave_at_tokens: Prompt and output at which a sequence leaves the instance, as at the end of its stage's range;
            0 for never. One that is as long already stays: no target has accepted it so far.
    """

    default_output_tokens: int
    max_model_len: int
    leave_at_tokens: int = 0

    def of_candidate(self, candidate: Candidate) -> int:
        """Assumed output length of each of its sequences, wherever they end."""
        assumed = self._assumed(candidate.expected_output_tokens, candidate.output_tokens)
        bound = candidate.max_tokens if candidate.max_tokens > 0 else assumed
        return min(assumed, bound, self.max_model_len - candidate.prompt_tokens)

    def of_placement(self, candidate: Candidate) -> int:
        """Output length at which each of its sequences ends here, or leaves."""
        return self._here(self.of_candidate(candidate), candidate.prompt_tokens, candidate.output_tokens)

    def of_sequence(self, status: SequenceStatus) -> int:
        """Output length at which it ends here, or leaves; no more than it has where it is at a bound and has ended."""
        assumed = self._assumed(status.expected_output_tokens, status.output_tokens)
        bounded = min(assumed, status.max_tokens, self.max_model_len - status.prompt_tokens)
        return self._here(bounded, status.prompt_tokens, status.output_tokens)

    def _here(self, final_tokens: int, prompt_tokens: int, output_tokens: int) -> int:
        stays = prompt_tokens + output_tokens >= self.leave_at_tokens
        return final_tokens if stays else min(final_tokens, self.leave_at_tokens - prompt_tokens)

    def _assumed(self, expected: int | None, generated: int) -> int:
        wanted = max(1, self.default_output_tokens if expected is None else expected)
        half = wanted // 2
        return max(wanted, generated + half) if generated < wanted else generated + max(OUTRUN_TOKENS, half)


def cached_of(status: SequenceStatus, cached: Mapping[str, int]) -> int:
    """Tokens of a waiting sequence that need not be computed: all but one of them at most.

    Args: cached: by sequence, tokens that are in the prefix cache.
    """
    return max(0, min(cached.get(status.sequence, 0), status.prompt_tokens + status.output_tokens - 1))
