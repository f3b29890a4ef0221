"""How long each sequence is assumed to become: one that a snapshot shows, and one that is only placed."""

from __future__ import annotations

import msgspec

from millrace.contracts.status import SequenceStatus
from millrace.enginemodel.forecast.lengths import LengthRule
from millrace.enginemodel.forecast.question import Candidate


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds and revises predicted output lengths.

    Attributes:
        default_output_tokens: Where nothing was predicted.
    """

    rule: LengthRule
    default_output_tokens: int
    max_model_len: int

    def of_candidate(self, candidate: Candidate) -> int:
        """Assumed output length of each of its sequences."""
        assumed = self._assumed(candidate.expected_output_tokens, candidate.output_tokens)
        bound = candidate.max_tokens if candidate.max_tokens > 0 else assumed
        return min(assumed, bound, self.max_model_len - candidate.prompt_tokens)

    def of_sequence(self, status: SequenceStatus) -> int:
        """Assumed output length; no more than it has where it is at a bound, and so has ended already."""
        assumed = self._assumed(status.expected_output_tokens, status.output_tokens)
        return min(assumed, status.max_tokens, self.max_model_len - status.prompt_tokens)

    def _assumed(self, expected: int | None, generated: int) -> int:
        wanted = self.default_output_tokens if expected is None else expected
        return max(self.rule.final_tokens(max(1, wanted), generated), generated + 1)
