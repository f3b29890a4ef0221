"""Many moves of sequences that decode beside each other, some of them going wrong: every token as unmoved."""

from tests.engine.moving import Pair
from tests.engine.travelling import travel

#: More by `python -m bench migration_soak`.
MOVES = 50


def test_many_moves_change_no_token_and_lose_no_block(pair: Pair) -> None:
    travel(pair, MOVES)
