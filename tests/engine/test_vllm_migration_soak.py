"""Many moves of sequences that decode beside each other, some of them going wrong: every token as unmoved.

tests/contract/engine moves sequences of all kinds of sampling, between engines that are alike.
"""

from millrace.contracts.worker import Sampling, StructuredOutput

from tests.engine.moving import Pair, begin, prompt_of, settled, whole
from tests.engine.travelling import KINDS, travel
from tests.testbed.tiny_llama import LAYERS

#: More by `python -m bench migration_soak`.
MOVES = 25
SCHEMA = (
    '{"type":"array","items":{"type":"object","properties":{"name":{"type":"string","maxLength":12}},'
    '"required":["name"],"additionalProperties":false},"minItems":5,"maxItems":20}'
)
#: Those that a target finds no prefix of, and whose grammar a target reads anew.
OTHERS = (
    (100, Sampling(max_tokens=190, temperature=0.0, ignore_eos=True, cache_salt="of one tenant")),
    (60, Sampling(max_tokens=180, seed=6, structured=StructuredOutput(json_schema=SCHEMA))),
)


def test_many_moves_change_no_token_lose_no_block_and_scatter_none(pair: Pair) -> None:
    travel(pair, MOVES, kinds=(*OTHERS, *KINDS))
    assert pair.source.info.kv.segments
    journey = begin(pair, prompt_of(450, salt=77), Sampling(max_tokens=100, ignore_eos=True), at=40)
    journey.go()
    whole(journey)
    assert len(journey.leased.blocks) >= 15
    assert journey.descriptors <= 3 * LAYERS, f"{journey.descriptors} pieces, {journey.leased.blocks}"
    settled(pair)
