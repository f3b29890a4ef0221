"""Log-probabilities as the two endpoints show them."""

from __future__ import annotations

from typing import Any

from services.ingress.calls.messages import DeltaLogprob


def chat_logprobs(entries: list[DeltaLogprob]) -> dict[str, Any]:
    """Chat's form: one object per token, bytes as a list of numbers."""
    return {
        "content": [
            {
                "token": e.token,
                "logprob": e.logprob,
                "bytes": list(e.token_bytes),
                "top_logprobs": [{"token": t, "logprob": p, "bytes": list(b)} for t, p, b in e.top],
            }
            for e in entries
        ]
    }


def prompt_entries(first: str, told: list[dict[str, Any] | None]) -> list[DeltaLogprob]:
    """A prompt's log-probabilities as those of an output; of its first token nothing but the name is known."""
    entries = [DeltaLogprob(first, None, b"", [])]
    for tokens in told[1:]:
        chosen, *others = (tokens or {}).values()
        top = [(each["decoded_token"], each["logprob"], b"") for each in (chosen, *others)]
        entries.append(DeltaLogprob(chosen["decoded_token"], chosen["logprob"], b"", top))
    return entries


class CompletionLogprobs:
    """Completions' form: parallel lists; offsets count characters of the choice's text from its start."""

    __slots__ = ("_offset",)

    def __init__(self) -> None:
        self._offset = 0

    def take(self, entries: list[DeltaLogprob]) -> dict[str, Any]:
        """The lists for these tokens; the offsets go on from the tokens before."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(entry.token)
        return {
            "text_offset": offsets,
            "token_logprobs": [e.logprob for e in entries],
            "tokens": [e.token for e in entries],
            "top_logprobs": [_top(e) for e in entries],
        }


def _top(entry: DeltaLogprob) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one, as OpenAI and vLLM give them; None where nothing is known."""
    if not entry.token_bytes and not entry.top:
        return None
    return {entry.token: entry.logprob} | {token: logprob for token, logprob, _ in entry.top}
