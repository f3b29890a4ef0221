"""The token budget of vLLM's next steps, changed between steps.

vLLM's scheduler reads ``max_num_scheduled_tokens`` once in each ``schedule()``. What is sized by it (buffers, graphs,
the profile run) is sized by its value at start, the largest one. A smaller value is therefore safe between any two
steps, with async scheduling too: a step under way keeps what it was given.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

_BUDGET = "max_num_scheduled_tokens"


class StepLimit:
    """Sole writer of a scheduler's budget after its start.

    Attributes:
        tokens: Bound in force; 0 where the engine has its own budget.
        refusal: Why this engine's budget cannot be changed; empty where it can.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._own: int = getattr(scheduler, _BUDGET, 0)
        self.tokens = 0
        self.refusal = refusal(scheduler)
        self._said = False

    def set(self, tokens: int) -> None:
        """Bounds the next steps; 0 for the engine's own budget. Says once where it cannot."""
        if self.refusal:
            if not self._said:
                logger.warning("the step budget stays as it is: %s", self.refusal)
            self._said = True
            return
        self.tokens = tokens if 0 < tokens < self._own else 0
        setattr(self._scheduler, _BUDGET, self.tokens or self._own)


def refusal(scheduler: Any) -> str:
    """Reasons why a scheduler's budget must not change; empty where it may."""
    config = scheduler.scheduler_config
    found = {
        f"this vLLM's scheduler has no {_BUDGET}": not isinstance(getattr(scheduler, _BUDGET, None), int),
        "chunked prefill is off": not config.enable_chunked_prefill,
        "it decodes speculatively": scheduler.vllm_config.speculative_config is not None,
    }
    return "; ".join(reason for reason, true in found.items() if true)
