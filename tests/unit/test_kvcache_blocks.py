"""An engine's block pool, and the mirror of its prefix cache: what that says is held is what the pool finds."""

import random

import pytest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.scheduler import Scheduler
from millrace.enginemodel.sequence import ScheduledSequence
from millrace.kvcache.chain import ROOT, chain_hash, extend_chain, pack_hashes, unpack_hashes
from millrace.kvcache.pool import BlockPool
from millrace.kvcache.prefix_index import Holding, PrefixIndex

BLOCK = 4


def names(tokens: list[int]) -> list[int]:
    hashes: list[int] = []
    extend_chain(hashes, tokens, BLOCK)
    return hashes


def served(index: PrefixIndex, hashes: list[int]) -> None:
    """A sequence that came, was computed and left."""
    holding = index.expect(hashes, coming=True)
    index.compute(holding, len(hashes))
    index.release(holding)
    index.check_invariants()


def test_hashes_travel_in_eight_bytes_each_and_a_broken_end_is_cut_off() -> None:
    hashes = [chain_hash(ROOT, [1, 2]), chain_hash(7, [3]), 0, -1, 2**63 - 1, -(2**63)]
    packed = pack_hashes(hashes)
    assert len(packed) == 8 * len(hashes)
    assert list(unpack_hashes(packed)) == hashes
    assert list(unpack_hashes(packed[:-3])) == hashes[:-1]


def test_a_prefix_is_found_up_to_the_first_block_that_is_not_there() -> None:
    index = PrefixIndex()
    served(index, [1, 2, 3])
    assert index.find([1, 2, 3, 4], coming=True) == 3
    assert index.find([1, 9, 3], coming=True) == 1
    assert index.find([9], coming=True) == 0
    assert len(index) == 3


def test_a_prompt_under_way_is_there_for_those_who_come_later_and_not_yet_computed() -> None:
    index = PrefixIndex()
    holding = index.expect([1, 2, 3], coming=True)
    assert index.find([1, 2, 3], coming=True) == 3
    assert index.find([1, 2, 3], coming=False) == 0
    index.compute(holding, 2)
    assert index.find([1, 2, 3], coming=False) == 2
    index.release(holding)
    assert index.find([1, 2, 3], coming=True) == 2, "what it did not compute never comes"


def test_what_was_left_longest_is_written_over_first_and_of_a_prompt_its_end() -> None:
    index = PrefixIndex()
    served(index, [1, 2, 3])
    served(index, [11, 12, 13])
    index.shrink(4)
    assert (index.find([1, 2, 3], coming=True), index.find([11, 12, 13], coming=True)) == (1, 3)
    served(index, [1, 2])  # used again: the youngest now
    index.shrink(2)
    assert (index.find([1, 2, 3], coming=True), index.find([11, 12, 13], coming=True)) == (2, 0)


def test_blocks_in_use_are_not_written_over() -> None:
    index = PrefixIndex()
    holding = index.expect([1, 2], coming=True)
    index.compute(holding, 2)
    served(index, [1, 2, 3])
    index.shrink(0)
    assert index.find([1, 2, 3], coming=False) == 2
    index.release(holding, further=[7])
    assert index.find([1, 2], coming=False) == 2
    index.shrink(2)
    assert index.find([7], coming=False) == 0, "what was decoded behind a prompt goes before it"


def test_a_hit_that_was_none_takes_all_with_it_that_was_left_before() -> None:
    index = PrefixIndex()
    served(index, [1, 2])
    served(index, [11, 12])
    served(index, [21, 22])
    holding = index.expect([11, 12, 13], coming=True)
    assert holding.hits == 2
    assert index.disprove(holding, 1) == 3, "12, which is missing, and 2 and 1, which were left before it"
    assert [index.find(prompt, coming=False) for prompt in ([1, 2], [11, 12], [21, 22])] == [0, 1, 2]
    assert index.disprove(holding, 2) == 0, "nothing was missing"


@pytest.mark.parametrize("together", [1, 6])
def test_it_says_what_the_engine_finds(together: int) -> None:
    found, believed, wrong = _compare(together, requests=400, seed=together)
    assert found > 4_000, "there is something to be found"
    assert believed > found * 0.9
    assert wrong < 0.02 * found, "an engine may hold a block twice, which no mirror knows"


def _compare(together: int, *, requests: int, seed: int) -> tuple[int, int, int]:
    """Tokens that an engine under memory pressure found, those believed, and those believed wrongly."""
    rng = random.Random(seed)
    parameters = EngineParameters(
        max_model_len=256, block_size=BLOCK, blocks_total=150, max_sequences=8, token_budget=128
    )
    scheduler, index = Scheduler(parameters), PrefixIndex()
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(4, 80))] for _ in range(12)]
    here: dict[ScheduledSequence, Holding] = {}
    found = believed = wrong = 0
    while requests or here:
        while requests and len(here) < together:
            requests -= 1
            tokens = rng.choice(prompts) + [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
            sequence = ScheduledSequence("", tokens, prompt_tokens=len(tokens), max_tokens=rng.randrange(1, 30))
            scheduler.add(sequence)
            here[sequence] = index.expect(names(tokens), coming=True)
        for sequence in scheduler.schedule().sampling:
            sequence.append(rng.randrange(1000))
        for sequence, holding in list(here.items()):
            index.compute(holding, sequence.computed // BLOCK)
            if sequence.total - sequence.prompt_tokens < sequence.max_tokens:
                continue
            scheduler.remove(sequence)
            further = names(sequence.token_ids[: sequence.computed])[len(holding.hashes) :]
            index.release(holding, further)
            del here[sequence]
            said = min(holding.hits, (sequence.prompt_tokens - 1) // BLOCK) * BLOCK
            found, believed = found + (sequence.hit_tokens or 0), believed + said
            wrong += abs(said - (sequence.hit_tokens or 0))
        index.shrink(scheduler.pool.free)
        index.check_invariants()
    return found, believed, wrong


def test_taking_more_than_is_free_is_a_bug() -> None:
    pool = BlockPool(2, caching=True)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.take(3)


def test_two_blocks_of_equal_content_both_stay_and_the_first_is_found() -> None:
    pool = BlockPool(4, caching=True)
    first, second = pool.take(2)
    pool.name(first, 11)
    pool.name(second, 11)
    assert pool.find([11], 1) == [first]
    pool.release([first])
    pool.take(3)  # reuses the first one too
    assert pool.find([11], 1) == [second]


@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_or_held_twice_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(40, caching=True)
    held: list[list[int]] = []
    for _ in range(400):
        if held and (rng.random() < 0.5 or pool.free < 5):
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            hashes = [rng.randrange(6) * 10 + depth for depth in range(rng.randrange(1, 5))]
            found = pool.find(hashes, len(hashes))
            pool.share(found)
            fresh = pool.take(min(len(hashes) - len(found), pool.free))
            for block, name in zip(fresh, hashes[len(found) :], strict=False):
                pool.name(block, name)
            held.append(found + fresh)
        pool.check_invariants()


def test_a_chain_hash_depends_on_everything_before_and_covers_full_blocks_only() -> None:
    hashes: list[int] = []
    extend_chain(hashes, list(range(10)), 4)
    assert len(hashes) == 2
    other: list[int] = []
    extend_chain(other, [99, *range(1, 10)], 4)
    assert other[1] != hashes[1]
    extend_chain(hashes, list(range(12)), 4)
    assert hashes[2] == chain_hash(hashes[1], [8, 9, 10, 11])
