"""Messages a tagger receives, and its answers."""

from __future__ import annotations

from millrace.contracts.message import Body


class TagRequest(Body, frozen=True, kw_only=True, tag="TagRequest/1"):
    """Asks for the expected output length of a request.

    Attributes:
        request: Id.
        model: Served model name.
        prompt_tokens: Length of the prompt, tokens.
        max_tokens: The client's bound, tokens.
        key: Name of the API key; empty for none.
        prompt: Start of the rendered prompt, at most 2,048 characters, for features.
    """

    request: str
    model: str
    prompt_tokens: int
    max_tokens: int
    temperature: float = 1.0
    key: str = ""
    prompt: str = ""


class LengthTag(Body, frozen=True, kw_only=True, tag="LengthTag/1"):
    """Expected output length, tokens. None everywhere means unknown.

    Attributes:
        mean: Expected value.
        p50: Median.
        p90: 90th percentile.
        source: What answered, for example ``unknown``, ``model``, ``history``.
    """

    request: str
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    source: str = "unknown"
