"""Contract of every Engine, modelled or real."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from millrace.actor.engine import EngineStepped
from millrace.contracts.ingress import FinishReason
from millrace.contracts.status import SequenceState

from tests.contract.engine.harness import (
    BLOCK_SIZE,
    BLOCKS_TOTAL,
    EOS,
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    TOKEN_BUDGET,
    VOCABULARY,
    Harness,
    without_sampling_noise,
)

SERIAL = itertools.count()


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Token ids; without a seed a prompt that no other test has used."""
    rng = random.Random(next(SERIAL) if seed is None else f"given {seed}")
    return [rng.randrange(200) for _ in range(length)]


@pytest.fixture(autouse=True)
def _quiet_before_and_after(engine: Harness) -> Iterator[None]:
    yield
    if engine.results:
        engine.cancel([name for name, result in engine.results.items() if not result.over])
        assert engine.until_idle().blocks_free == BLOCKS_TOTAL


def test_it_says_what_it_is(engine: Harness) -> None:
    info = engine.info
    assert (info.max_model_len, info.max_sequences, info.token_budget) == (MAX_MODEL_LEN, MAX_SEQUENCES, TOKEN_BUDGET)
    assert (info.block_size, info.blocks_total) == (BLOCK_SIZE, BLOCKS_TOTAL)
    assert info.engine in ("modelled", "vllm")
    assert info.engine_version


def test_a_sequence_is_added_then_gives_its_tokens_then_ends(engine: Harness) -> None:
    result = engine.run(prompt(20), max_tokens=12, ignore_eos=True)
    assert result.added
    assert len(result.token_ids) == 12
    assert result.finish is FinishReason.LENGTH
    assert [output.finish for output in result.outputs[:-1]] == [None] * (len(result.outputs) - 1)
    assert all(0 <= token < VOCABULARY for token in result.token_ids)


def test_the_first_output_tells_when_it_was_scheduled_and_what_was_cached(engine: Harness) -> None:
    before_ns = engine.now_ns()
    result = engine.run(prompt(70), max_tokens=3, ignore_eos=True)
    first, *rest = result.outputs
    assert before_ns - 10_000_000 <= first.scheduled_ns <= engine.now_ns()
    assert first.cached_tokens == 0
    assert [(output.scheduled_ns, output.cached_tokens) for output in rest] == [(0, None)] * len(rest)


def test_a_prompt_seen_before_is_cached_in_full_blocks(engine: Harness) -> None:
    tokens = prompt(3 * BLOCK_SIZE + 5)
    first = engine.run(tokens, max_tokens=4, ignore_eos=True)
    again = engine.run(tokens, max_tokens=4, ignore_eos=True)
    assert first.outputs[0].cached_tokens == 0
    assert again.outputs[0].cached_tokens == 3 * BLOCK_SIZE
    assert again.token_ids == first.token_ids


def test_sequences_side_by_side_get_what_they_get_alone(engine: Harness) -> None:
    prompts = [prompt(length) for length in (1, 5, 33, 64, 90)]
    together = [engine.add(tokens, max_tokens=20, ignore_eos=True) for tokens in prompts]
    outputs = [engine.finish(name).token_ids for name in together]
    assert outputs == [engine.run(tokens, max_tokens=20, ignore_eos=True).token_ids for tokens in prompts]
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_more_sequences_than_places_run_and_wait_in_order(engine: Harness) -> None:
    since = len(engine.events)
    names = [engine.add(prompt(8), max_tokens=6 + index % 3, ignore_eos=True) for index in range(3 * MAX_SEQUENCES)]
    for index, name in enumerate(names):
        assert len(engine.finish(name).token_ids) == 6 + index % 3
    snapshots = [snapshot for snapshot in engine.snapshots(since) if snapshot.waiting]
    assert any(len(snapshot.running) == MAX_SEQUENCES for snapshot in snapshots)
    for snapshot in snapshots:
        order = [names.index(status.sequence) for status in (*snapshot.running, *snapshot.waiting)]
        assert order == sorted(order)
    firsts: dict[str, None] = {}
    for event in engine.events[since:]:
        if isinstance(event, EngineStepped):
            firsts.update(dict.fromkeys(output.sequence for output in event.outputs))
    assert [sorted(batch) for batch in _batches(list(firsts))] == [sorted(batch) for batch in _batches(names)]


def _batches(names: list[str]) -> list[list[str]]:
    return [names[start : start + MAX_SEQUENCES] for start in range(0, len(names), MAX_SEQUENCES)]


def test_it_ends_with_eos_where_the_model_says_so_but_not_before_min_tokens(engine: Harness) -> None:
    result = engine.run(prompt(10), max_tokens=150, min_tokens=70, logit_bias={EOS: 100.0})
    assert result.finish is FinishReason.STOP
    assert result.token_ids.index(EOS) == len(result.token_ids) - 1 >= 70


def test_ignore_eos_goes_on_to_max_tokens(engine: Harness) -> None:
    result = engine.run(prompt(10), max_tokens=100, ignore_eos=True, logit_bias={EOS: 100.0})
    assert len(result.token_ids) == 100
    assert result.finish is FinishReason.LENGTH


def test_a_stop_token_ends_it_and_is_its_last_token(engine: Harness) -> None:
    tokens = prompt(15)
    free = engine.run(tokens, max_tokens=30, ignore_eos=True).token_ids
    stop = free[7]
    stopped = engine.run(tokens, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    assert stopped.token_ids == free[: free.index(stop) + 1]
    assert stopped.finish is FinishReason.STOP


def test_a_stop_token_does_not_end_it_before_min_tokens(engine: Harness) -> None:
    tokens = prompt(15)
    free = engine.run(tokens, max_tokens=30, ignore_eos=True).token_ids
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "stop_token_ids": [free[0]], "min_tokens": 10}
    held = engine.run(tokens, **options)
    assert len(held.token_ids) > 10
    assert free[0] not in held.token_ids[:10]


@pytest.mark.parametrize(("length", "max_tokens", "tokens"), [(MAX_MODEL_LEN - 6, 50, 6), (4, 1, 1)])
def test_the_models_limit_or_its_own_ends_it(engine: Harness, length: int, max_tokens: int, tokens: int) -> None:
    result = engine.run(prompt(length), max_tokens=max_tokens, ignore_eos=True)
    assert len(result.token_ids) == tokens
    assert result.finish is FinishReason.LENGTH


def test_log_probabilities_come_with_each_token(engine: Harness) -> None:
    result = engine.run(prompt(10), max_tokens=8, ignore_eos=True, logprobs=3)
    assert len(result.logprobs) == 8
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        assert entry.token_ids[0] == token
        assert len(entry.token_ids) == len(entry.logprobs) == 4
        assert entry.logprobs[1:] == sorted(entry.logprobs[1:], reverse=True)
        assert all(value <= 0 for value in entry.logprobs)
        assert entry.rank == 1  # greedy


def test_log_probabilities_of_the_chosen_token_alone_and_none_at_all(engine: Harness) -> None:
    chosen = engine.run(prompt(10), max_tokens=3, ignore_eos=True, logprobs=0)
    assert [len(entry.token_ids) for entry in chosen.logprobs] == [1, 1, 1]
    none = engine.run(prompt(10), max_tokens=3, ignore_eos=True)
    assert [output.logprobs for output in none.outputs] == [None] * 3


def test_a_seed_repeats_and_other_seeds_differ(engine: Harness) -> None:
    tokens = prompt(100)  # in two chunks
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    outputs = [engine.run(tokens, seed=seed, **options).token_ids for seed in (11, 11, 12, 13)]
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs}) == 3


CONTINUED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    "seed": {"temperature": 1.0, "seed": 5},
    "seed-and-top-p": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 6},
    "logprobs": {"logprobs": 2},
    "min-tokens": {"min_tokens": 30, "ignore_eos": False, "logit_bias": {EOS: 100.0}},
}


@pytest.mark.parametrize("options", CONTINUED.values(), ids=CONTINUED)
def test_a_continuation_gives_the_tokens_of_the_uninterrupted_run(engine: Harness, options: dict[str, Any]) -> None:
    tokens = prompt(40)
    sampling = {"max_tokens": 48, "ignore_eos": True, **options}
    whole = engine.run(tokens, **sampling)
    breaks = [min(already, len(whole.token_ids) - 1) for already in (1, 17, 39)]
    names = [engine.add(tokens, output=whole.token_ids[:already], **sampling) for already in breaks]
    for already, rest in zip(breaks, map(engine.finish, names), strict=True):
        assert whole.token_ids[:already] + rest.token_ids == whole.token_ids
        assert rest.finish is whole.finish
        if "logprobs" in options:
            expected = without_sampling_noise(whole.logprobs[already:])
            assert without_sampling_noise(rest.logprobs) == expected


def test_a_continuation_counts_earlier_tokens_for_a_stop_token(engine: Harness) -> None:
    tokens = prompt(15)
    free = engine.run(tokens, max_tokens=30, ignore_eos=True).token_ids
    stop = free[20]
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "stop_token_ids": [stop]}
    first = free.index(stop)
    already = max(0, first - 2)
    rest = engine.run(tokens, output=free[:already], **options)
    assert free[:already] + rest.token_ids == free[: first + 1]
    assert rest.finish is FinishReason.STOP


REFUSED: dict[str, tuple[list[int], dict[str, Any]]] = {
    "empty": ([], {}),
    "too-long": (prompt(MAX_MODEL_LEN + 1, 0), {}),
    "no-room-for-output": (prompt(MAX_MODEL_LEN, 0), {}),
    "unknown-token": ([5, VOCABULARY + 5], {}),
    "min-above-max": (prompt(5, 0), {"min_tokens": 20, "max_tokens": 10}),
    "top-p": (prompt(5, 0), {"top_p": 1.5}),
    "temperature": (prompt(5, 0), {"temperature": -1.0}),
    "no-tokens-wanted": (prompt(5, 0), {"max_tokens": 0}),
    "penalty": (prompt(5, 0), {"frequency_penalty": 2.5}),
    "repetition": (prompt(5, 0), {"repetition_penalty": 0.0}),
    "min-p": (prompt(5, 0), {"min_p": 1.5}),
    "logprobs": (prompt(5, 0), {"logprobs": 50}),
}


@pytest.mark.parametrize(("tokens", "sampling"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_with_a_sentence(
    engine: Harness, tokens: list[int], sampling: dict[str, Any]
) -> None:
    name = engine.add(tokens, **sampling)
    engine.until(lambda: engine.results[name].over, "an answer")
    result = engine.results[name]
    assert result.rejected, result.outputs
    assert not result.added
    assert engine.run(prompt(5), max_tokens=2, ignore_eos=True).finish is FinishReason.LENGTH


def test_a_cancelled_sequence_is_silent_and_its_blocks_are_free(engine: Harness) -> None:
    name = engine.add(prompt(100), max_tokens=150, ignore_eos=True)
    result = engine.results[name]
    engine.until(lambda: len(result.outputs) >= 3, "outputs")
    engine.cancel([name])
    heard = len(result.outputs)
    assert engine.until_idle().blocks_free == BLOCKS_TOTAL
    engine.rest()
    assert len(result.outputs) == heard


def test_cancelling_one_does_not_touch_the_others(engine: Harness) -> None:
    tokens = [prompt(30) for _ in range(4)]
    names = [engine.add(each, max_tokens=60, ignore_eos=True) for each in tokens]
    engine.until(lambda: all(engine.results[name].outputs for name in names), "all to run")
    engine.cancel(names[1:3])
    kept = [engine.finish(name).token_ids for name in (names[0], names[3])]
    alone = [engine.add(each, max_tokens=60, ignore_eos=True) for each in (tokens[0], tokens[3])]
    assert kept == [engine.finish(name).token_ids for name in alone]


def test_a_waiting_sequence_can_be_cancelled(engine: Harness) -> None:
    names = [engine.add(prompt(10), max_tokens=120, ignore_eos=True) for _ in range(MAX_SEQUENCES + 2)]
    engine.until(lambda: engine.results[names[0]].over or bool(engine.results[names[0]].outputs), "a start")
    engine.cancel(names[-2:])
    engine.cancel(names[:-2])
    engine.until_idle()
    assert not engine.results[names[-1]].outputs


def test_cancelling_what_is_unknown_or_over_is_no_error(engine: Harness) -> None:
    result = engine.run(prompt(5), max_tokens=2, ignore_eos=True)
    engine.cancel(["nobody.0", *(name for name, known in engine.results.items() if known is result)])
    assert engine.run(prompt(5), max_tokens=2, ignore_eos=True).finish is FinishReason.LENGTH


def test_a_cancelled_name_may_come_again_at_once(engine: Harness) -> None:
    tokens = prompt(20)
    engine.add_as("again.0", tokens, max_tokens=100, ignore_eos=True)
    result = engine.results["again.0"]
    engine.until(lambda: bool(result.outputs), "outputs")
    engine.cancel(["again.0"])
    del engine.results["again.0"]
    engine.add_as("again.0", tokens, max_tokens=9, ignore_eos=True)
    assert len(engine.finish("again.0").token_ids) == 9


def test_every_snapshot_is_consistent(engine: Harness) -> None:
    since = len(engine.events)
    names = [engine.add(prompt(10 + 7 * index), max_tokens=20 + index, ignore_eos=True) for index in range(12)]
    for name in names:
        engine.finish(name)
    engine.until_idle()
    snapshots = engine.snapshots(since)
    assert len(snapshots) > 10
    for snapshot in snapshots:
        held = sum(status.blocks for status in snapshot.running)
        assert held + snapshot.blocks_free == snapshot.blocks_total == BLOCKS_TOTAL  # no prefix is shared here
        assert len(snapshot.running) <= MAX_SEQUENCES
        assert all(status.state is SequenceState.RUNNING for status in snapshot.running)
        assert all(status.state is not SequenceState.RUNNING for status in snapshot.waiting)
        assert all(status.blocks == 0 for status in snapshot.waiting)
        for status in snapshot.running:
            tokens = status.prompt_tokens + status.output_tokens
            assert 0 < status.computed_tokens <= tokens <= status.computed_tokens + status.prompt_tokens
            assert status.output_tokens < status.max_tokens
        batch = snapshot.batch
        assert batch.decodes + batch.prefill_tokens <= TOKEN_BUDGET
        assert (batch.prefills > 0) == (batch.prefill_tokens > 0) == (batch.prefill_work > 0)


def test_snapshots_follow_the_steps(engine: Harness) -> None:
    since = len(engine.events)
    engine.run(prompt(40), max_tokens=20, ignore_eos=True)
    engine.until_idle()
    snapshots = engine.snapshots(since)
    for earlier, later in itertools.pairwise(snapshots):
        assert later.step >= earlier.step
        assert later.at_ns >= earlier.at_ns
        assert later.preemptions >= earlier.preemptions
    assert all(snapshot.step_duration_ns > 0 for snapshot in snapshots)
    steps = [event.step for event in engine.events[since:] if isinstance(event, EngineStepped) and event.outputs]
    assert steps == list(range(steps[0], steps[0] + 20))


def test_preemption_for_want_of_blocks_changes_no_token(engine: Harness) -> None:
    prompts = [prompt(40) for _ in range(MAX_SEQUENCES)]
    engine.run(prompt(3), max_tokens=1)
    before = engine.until_idle().preemptions
    since = len(engine.events)
    names = [engine.add(tokens, max_tokens=110, ignore_eos=True) for tokens in prompts]
    outputs = [engine.finish(name).token_ids for name in names]
    engine.until_idle()
    snapshots = engine.snapshots(since)
    assert snapshots[-1].preemptions > before
    assert any(status.state is SequenceState.PREEMPTED for snapshot in snapshots for status in snapshot.waiting)
    assert snapshots[-1].preemptions - before == sum(engine.results[name].outputs[-1].preemptions for name in names)
    for start in range(0, MAX_SEQUENCES, 4):  # so many have room
        names = [engine.add(tokens, max_tokens=110, ignore_eos=True) for tokens in prompts[start : start + 4]]
        assert [engine.finish(name).token_ids for name in names] == outputs[start : start + 4]


def test_a_bound_of_steps_is_told_holds_and_is_lifted_and_changes_no_token(engine: Harness) -> None:
    bound = MAX_SEQUENCES + 3
    prompts = [prompt(TOKEN_BUDGET // 2 + index) for index in range(3)]
    engine.limit(bound)
    engine.until(lambda: any(s.token_budget == bound for s in engine.snapshots()[-1:]), "the bound to be told")
    since = len(engine.events)
    names = [engine.add(each, max_tokens=12, temperature=0.0, ignore_eos=True) for each in prompts]
    bounded = [engine.finish(name).token_ids for name in names]
    steps = [snapshot.batch for snapshot in engine.snapshots(since)]
    assert 0 < max(step.decodes + step.prefill_tokens for step in steps) <= bound
    engine.limit(0)
    engine.until(lambda: engine.snapshots()[-1].token_budget == 0, "the bound to be lifted")
    names = [engine.add(each, max_tokens=12, temperature=0.0, ignore_eos=True) for each in prompts]
    engine.until(lambda: bool(engine.results[names[0]].outputs), "a start")
    engine.limit(bound)
    assert [engine.finish(name).token_ids for name in names] == bounded
    engine.limit(0)
