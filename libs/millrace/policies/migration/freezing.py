"""Decision to freeze the source: after how many rounds of copying, during which it decodes on."""

from __future__ import annotations

#: A round that brought no more full blocks than this is not worth another one: the next would bring as many.
NEW_BLOCKS_MAX = 1


def freeze_now(*, new_blocks: int, rounds: int, rounds_max: int) -> bool:
    """Whether to freeze instead of another round.

    Each round moves what was decoded during the one before, so rounds shrink as long as copying is faster than
    decoding; where it is not, ``rounds_max`` ends it.

    Args:
        new_blocks: Full blocks that the target does not have.
        rounds: Rounds done.
        rounds_max: Bound; 0 for stop-and-copy.

    Source: Llumnix, section 4.2, and CascadeInfer, section 5; it differs in that a round counts blocks, not requests'
        tokens, since only full blocks travel while the source decodes.
    """
    return rounds >= rounds_max or new_blocks <= NEW_BLOCKS_MAX
