"""Reports on a cascade's course, in the form that its responses and streams carry."""

from __future__ import annotations

from typing import Any

from millrace.contracts.observers import CascadeAttempt

from services.ingress.calls.messages import CascadeReport, Usage


def cascade_object(report: CascadeReport) -> dict[str, Any]:
    """The field ``cascade`` of a response, and of the last chunks of a stream."""
    return {
        "name": report.name,
        "tier": report.tier,
        "model": report.model,
        "score": rounded(report.score),
        "reason": report.reason,
        "attempts": [
            {
                "tier": attempt.tier,
                "model": attempt.model,
                "outcome": attempt.outcome,
                "score": rounded(attempt.score),
                "threshold": rounded(attempt.threshold),
            }
            for attempt in report.attempts
        ],
    }


def usage_object(usage: Usage, report: CascadeReport | None = None) -> dict[str, object]:
    """OpenAI's ``usage`` of the delivered answer; with a report also that of all attempts."""
    counts: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    if report is not None:
        pairs = zip(report.attempts, report.usages, strict=True)
        attempts = [{"model": attempt.model, **usage_object(used)} for attempt, used in pairs]
        counts["cascade"] = {"attempts": attempts}
    return counts


def answering_headers(answering: CascadeAttempt) -> list[tuple[bytes, bytes]]:
    """Headers that say who answers; the score only where the answer was complete."""
    headers = [
        (b"x-millrace-model", answering.model.encode("ascii", "replace")),
        (b"x-millrace-tier", b"%d" % answering.tier),
    ]
    if answering.score is not None:
        headers.append((b"x-millrace-score", b"%.2f" % answering.score))
    return headers


def rounded(score: float | None) -> float | None:
    """A score as it is shown."""
    return None if score is None else round(score, 2)
