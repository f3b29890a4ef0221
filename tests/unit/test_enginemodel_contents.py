"""Contents of a modelled engine's blocks, and what a sequence finds there."""

import pytest
from millrace.actor.engine import EngineSequence
from millrace.contracts.worker import Sampling
from millrace.enginemodel.contents import NOTHING, KvContent, KvContents
from millrace.enginemodel.stream import ModelledSequence
from millrace.enginemodel.tokens import ROOT, OutputLengths, Vocabulary, kv_digest, kv_words

SIZE = 4
PROMPT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def sequence(prompt: list[int], blocks: list[int], computed: int) -> ModelledSequence:
    source = EngineSequence(sequence="s", prompt_token_ids=prompt, sampling=Sampling(max_tokens=100))
    made = ModelledSequence(
        source, vocabulary=Vocabulary(), table=Vocabulary().table(), lengths=OutputLengths(), max_model_len=999
    )
    made.blocks, made.computed = blocks, computed
    return made


def written() -> KvContents:
    """PROMPT's KV in blocks 7, 3, 5."""
    contents = KvContents(SIZE)
    contents.left(sequence(PROMPT, [7, 3, 5], 10))
    return contents


def finds(contents: KvContents, blocks: list[int], tokens: int) -> bool:
    """Whether a sequence finds its own KV there."""
    before = len(contents.poisoned)
    contents.found(sequence(PROMPT, blocks, tokens), tokens)
    return len(contents.poisoned) == before


def test_a_block_holds_its_tokens_and_what_they_were_computed_behind() -> None:
    assert written().look([7, 3, 5, 9], ()) == [
        KvContent(ROOT, kv_words(PROMPT[:4])),
        KvContent(kv_digest(PROMPT[:4]), kv_words(PROMPT[4:8])),
        KvContent(kv_digest(PROMPT[:8]), kv_words(PROMPT[8:])),
        NOTHING,
    ]


@pytest.mark.parametrize("tokens", [0, 1, 4, 7, 8, 10])
def test_right_blocks_in_order_give_the_digest_of_their_tokens(tokens: int) -> None:
    contents, arrived = written(), sequence(PROMPT, [7, 3, 5], tokens)
    contents.found(arrived, tokens)
    assert arrived.found_digest == kv_digest(PROMPT[:tokens])
    assert not contents.poisoned
    assert arrived.next_token() == sequence(PROMPT, [], 0).next_token()


@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [([3, 7, 5], 8), ([7, 7, 5], 8), ([7, 9, 5], 8), ([7, 3, 3], 10), ([7, 3, 5], 11), ([5, 3, 7], 2)],
)
def test_misplaced_missing_and_half_full_blocks_are_not_its_own(blocks: list[int], tokens: int) -> None:
    contents, arrived = written(), sequence([*PROMPT, 20, 21], blocks, tokens)
    contents.found(arrived, tokens)
    assert contents.poisoned == ["s"]
    assert arrived.found_digest != kv_digest([*PROMPT, 20, 21][:tokens])


def test_a_block_that_is_read_into_holds_nothing_meanwhile_and_then_what_came() -> None:
    contents = written()
    there = contents.look([7, 3], ())
    contents.put([7], [NOTHING])
    assert not finds(contents, [7, 3], 8)
    contents.put([1, 2], there)
    assert finds(contents, [1, 2], 8)


def test_a_half_full_block_that_came_stays_as_it_came_and_is_filled_on() -> None:
    contents = written()
    contents.put([8], [KvContent(kv_digest(PROMPT[:4]), kv_words(PROMPT[4:6]))])
    arrived = sequence(PROMPT, [7, 8, 9], 6)
    contents.found(arrived, 6)
    arrived.computed = 10
    contents.left(arrived)
    assert finds(contents, [7, 8, 9], 10)
    contents.put([8], [KvContent(kv_digest(PROMPT[:4]), kv_words([1, 2]))])
    wrong = sequence(PROMPT, [7, 8, 9], 6)
    contents.found(wrong, 6)
    wrong.computed = 10
    contents.left(wrong)
    assert not finds(contents, [7, 8, 9], 8)
