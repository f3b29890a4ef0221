"""Messages a tagger receives, and its answers."""

from __future__ import annotations

from millrace.contracts.message import Body


class TagRequest(Body, frozen=True, kw_only=True, tag="TagRequest/1"):
    """Asks for the expected output length of a request.

    Attributes:
        request: Id.
        model: Served model name.
        prompt_tokens: Length of the prompt (of all prompts together, where there are several), tokens.
        max_tokens: The client's bound, tokens.
        key: Name of the API key; empty for none.
        prompt: Start of the rendered prompt, at most 2,048 characters, for features.
        prompts: How many prompts the call has.
        n: Choices per prompt.
        min_tokens: Tokens before which nothing may end the output.
        top_p: Nucleus share.
        penalties: Presence plus frequency penalty plus the repetition penalty's excess over 1.
        stops: Number of stop strings and stop token ids.
        structured: Kind of the output's constraint, ``json_schema``, ``regex``, ...; empty for none.
    """

    request: str
    model: str
    prompt_tokens: int
    max_tokens: int
    temperature: float = 1.0
    key: str = ""
    prompt: str = ""
    prompts: int = 1
    n: int = 1
    min_tokens: int = 0
    top_p: float = 1.0
    penalties: float = 0.0
    stops: int = 0
    structured: str = ""


class LengthTag(Body, frozen=True, kw_only=True, tag="LengthTag/1"):
    """Expected output length of one choice, tokens. None everywhere means unknown.

    Attributes:
        mean: Expected value.
        p50: Median.
        p90: 90th percentile; never below the median.
        source: What answered: ``stated``, ``model``, ``history`` or ``unknown``.
    """

    request: str
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    source: str = "unknown"
