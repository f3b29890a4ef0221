"""Stages of equal ratio, for `--stages N`. Pure."""

from __future__ import annotations

import math

from millrace.cluster.spec import StageSpec

#: Lengths below this are one stage: decode steps of so short sequences cost the same.
SHORTEST_CUT = 128


def even_stages(count: int, length_max: int) -> list[StageSpec]:
    """``count`` stages whose cuts divide 128 .. ``length_max`` (the model's context, tokens) by equal ratios.

    Cuts are multiples of 16. With 2 stages and a context of 4,096 the cut is at 720.

    Raises:
        ValueError: the context is too short for so many stages.
    """
    ratio = math.log(max(1, length_max) / SHORTEST_CUT) / count if length_max > SHORTEST_CUT else 0.0
    cuts = [round(SHORTEST_CUT * math.exp(ratio * index) / 16) * 16 for index in range(1, count)]
    if sorted(set(cuts)) != cuts or (cuts and not SHORTEST_CUT < cuts[0] <= cuts[-1] < length_max):
        raise ValueError(f"{count} stages do not fit into a context of {length_max} tokens")
    lows, highs = [0, *cuts], [*cuts, None]
    return [
        StageSpec(name=f"s{index}", length_min=low, length_max=high)
        for index, (low, high) in enumerate(zip(lows, highs, strict=True))
    ]
