"""Grammars that are slow to match end their own sequence, before the engine's steps wait for them.

A grammar that compiles in a millisecond may take ever longer to match: ``(a*)*b`` has as many ways through n letters as
there are ways to cut them, and the matcher keeps them all. It runs between an engine's steps, so that everybody waits.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

logger = logging.getLogger(__name__)

#: Processor time that a sequence's grammar may take at once, and what each token adds. Those of schemas take 20 µs.
SAVED_S = 0.1
PER_TOKEN_S = 0.005


class MeteredGrammar:
    """A grammar that accepts no more tokens once it has taken too long; vLLM then ends its request with an error."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._left_s = SAVED_S

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Advances it, unless its time is used up."""
        if self._left_s < 0:
            logger.error("the grammar of %s takes too long to match", request_id)
            return False
        began = time.thread_time()
        accepted: bool = self._grammar.accept_tokens(request_id, tokens)
        self._left_s += PER_TOKEN_S * len(tokens) - (time.thread_time() - began)
        self._left_s = min(self._left_s, SAVED_S)
        return accepted

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Fills one row; an exhausted grammar fills no more, and its next token ends it."""
        if self._left_s < 0:
            return
        began = time.thread_time()
        self._grammar.fill_bitmask(bitmask, batch_index)
        self._left_s -= time.thread_time() - began

    def __getattr__(self, name: str) -> Any:
        """All else is the grammar's own."""
        return getattr(self._grammar, name)


def install(manager: StructuredOutputManager) -> None:
    """Meters each grammar that an engine compiles from now on."""
    create = manager._create_grammar
    manager._create_grammar = lambda request: MeteredGrammar(create(request))
