"""Sampling parameters that an engine refuses: vLLM's ranges, and what a model cannot do."""

from __future__ import annotations

from millrace.contracts.worker import Sampling

LOGPROBS_MAX = 20  # vLLM's default


def sampling_refusal(sampling: Sampling) -> str | None:
    """Return the violated rule, naming the field and the value; None if there is none."""
    checks = {
        "max_tokens must be at least 1": sampling.max_tokens >= 1,
        "min_tokens must be in 0..max_tokens": 0 <= sampling.min_tokens <= sampling.max_tokens,
        "temperature must not be negative": sampling.temperature >= 0,
        "top_p must be in (0, 1]": 0 < sampling.top_p <= 1,
        "top_k must be -1 or more": sampling.top_k >= -1,
        "min_p must be in [0, 1]": 0 <= sampling.min_p <= 1,
        "presence_penalty must be in [-2, 2]": -2 <= sampling.presence_penalty <= 2,
        "frequency_penalty must be in [-2, 2]": -2 <= sampling.frequency_penalty <= 2,
        "repetition_penalty must be above 0": sampling.repetition_penalty > 0,
        f"logprobs must be in 0..{LOGPROBS_MAX}": sampling.logprobs is None or 0 <= sampling.logprobs <= LOGPROBS_MAX,
        "structured output is not possible: the modelled engine has no grammars": sampling.structured is None,
    }
    for rule, holds in checks.items():
        if not holds:
            field = rule.partition(" ")[0]
            return f"{rule}, is {getattr(sampling, field)}" if field != "structured" else rule
    return None
