"""Judges by name: what a model is asked about an answer, and the score that its reply means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millrace.policies.judges.external import policy as external
from millrace.policies.judges.llm import policy as llm
from millrace.policies.judges.verdict import Judged, Verdict
from millrace.policies.registry import Policy, Registry

__all__ = ["JUDGES", "JudgePolicy", "Judged", "Verdict"]


class JudgePolicy(Policy, frozen=True, kw_only=True):
    """One judge of the registry. The model is asked through an OpenAI-compatible API, once per choice.

    Attributes:
        question: (answer, parameters) -> the body of ``POST /chat/completions``, all but the model.
        verdict: (bytes of the response, answer, parameters) -> Verdict.
    """

    question: Callable[[Judged, Any], dict[str, Any]]
    verdict: Callable[[bytes, Judged, Any], Verdict]


#: To add a judge: its folder, its import above and a word here; or a file that the configuration names.
JUDGES = Registry("judges", JudgePolicy, (external, llm))
