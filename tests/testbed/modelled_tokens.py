"""The tokens of a modelled engine whose KV is right."""

from collections.abc import Sequence

from millrace.enginemodel.tokens import kv_digest, next_token


def tokens_after(token_ids: Sequence[int], count: int, *, salt: int = 0, table: Sequence[int]) -> list[int]:
    """Return the tokens that an engine with the right KV generates after ``token_ids``, without any end or stop."""
    digest, tokens = kv_digest(token_ids), []
    for _ in range(count):
        tokens.append(next_token(digest, salt, table))
        digest = kv_digest(tokens[-1:], digest)
    return tokens
