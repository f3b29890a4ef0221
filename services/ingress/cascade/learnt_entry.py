"""Chances of a cascade's models to be right, estimated from the prompt alone: what the entry policy ``learnt`` sees.

The trees were fitted to recorded answers of these models (``millrace train entry``). No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from millrace.cascade.entry import EntryModel, prompt_features

from services.ingress.cascade.entry import PromptEstimate


class LearntEntry:
    """Estimates for one cascade.

    Raises:
        ValueError: the model has no costs, or another number of tiers.
    """

    def __init__(self, model: EntryModel, tiers: Sequence[str]) -> None:
        """``tiers``: served names of the models it was fitted to, in its order."""
        if len(tiers) != len(model.file.models) or len(model.file.costs) != len(tiers):
            raise ValueError(f"fitted to {', '.join(model.file.models)} with their costs, not to {', '.join(tiers)}")
        self._model = model
        self._positions = {name: index for index, name in enumerate(tiers)}

    def estimate(self, tiers: Sequence[str], prompt_head: str, prompt_tokens: int) -> PromptEstimate | None:
        """Chances and costs of the models of a plan's tiers; None without text, or where one of them is unknown."""
        if not prompt_head or any(name not in self._positions for name in tiers):
            return None
        row = np.array(prompt_features(prompt_head, max(1, prompt_tokens)), dtype=np.float64)
        chances = self._model.probabilities(row)
        costs = self._model.file.costs
        order = [self._positions[name] for name in tiers]
        return PromptEstimate(
            chances=tuple(float(chances[index]) for index in order),
            costs=tuple(costs[index] for index in order),
            value=self._model.file.value,
        )
